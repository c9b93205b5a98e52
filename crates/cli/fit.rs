//! Shortens and pads texts to a number of terminal columns.

use unicode_width::UnicodeWidthChar;

/// The width of the terminal in columns; 100 without a terminal.
pub fn terminal_width() -> usize {
    terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0))
}

/// The text shortened to `columns`, or padded on the right. Control characters become `·`, so that
/// they do not act on the terminal.
pub fn fit(text: &str, columns: usize) -> String {
    let (shortened, padding) = shortened(text, columns);
    shortened + &padding
}

/// Like [`fit`], but padded on the left.
pub fn fit_right(text: &str, columns: usize) -> String {
    let (shortened, padding) = shortened(text, columns);
    padding + &shortened
}

/// The text shortened to `columns`, and the spaces that it lacks.
fn shortened(text: &str, columns: usize) -> (String, String) {
    let (mut fitted, mut width) = (String::new(), 0);
    let mut rest = text.chars().map(|c| if c.is_control() { '·' } else { c }).peekable();
    while let Some(&c) = rest.peek() {
        let more = c.width().unwrap_or(0);
        if width + more > columns {
            break;
        }
        fitted.push(c);
        width += more;
        rest.next();
    }
    if rest.peek().is_some() {
        while width > columns - 1 {
            width -= fitted.pop().and_then(UnicodeWidthChar::width).unwrap_or(0);
        }
        fitted.push('…');
        width += 1;
    }
    (fitted, " ".repeat(columns - width))
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthStr;

    use super::*;

    #[test]
    fn texts_are_fitted_to_columns_without_control_characters() {
        for text in
            ["", "short", &"x".repeat(40), &"x".repeat(41), &"東京".repeat(30), "\x1b[31mred"]
        {
            assert_eq!(fit(text, 40).width(), 40, "{text:?}");
            assert_eq!(fit_right(text, 40).width(), 40, "{text:?}");
            assert!(!fit(text, 40).contains('\x1b'));
        }
        assert_eq!(fit(&"x".repeat(41), 40), "x".repeat(39) + "…");
        assert_eq!(fit_right("東京", 6), "  東京");
    }
}
