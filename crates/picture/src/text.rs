//! Texts in XML.

/// The text, or its first `max − 1` characters and `…` if it has more than `max`.
pub fn shortened(text: &str, max: usize) -> String {
    if text.chars().count() > max {
        text.chars().take(max - 1).chain(['…']).collect()
    } else {
        text.to_string()
    }
}

/// A text with XML's special characters escaped. Control characters, and characters that XML does
/// not allow, become `·`.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('·'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_and_control_characters_are_escaped() {
        assert_eq!(escaped("<a & \"b\"\u{1}\u{ffff}>"), "&lt;a &amp; &quot;b&quot;··&gt;");
    }

    #[test]
    fn long_texts_are_shortened() {
        assert_eq!(shortened("abc", 3), "abc");
        assert_eq!(shortened("abcd", 3), "ab…");
    }
}
