//! Shortens and pads texts to a number of terminal columns.

use unicode_width::UnicodeWidthStr;

/// The width of the terminal in columns; 100 without a terminal.
pub fn terminal_width() -> usize {
    terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0))
}

/// The text shortened to `columns`, or padded on the right. Control characters and those that
/// change the direction of text become `·`, so that they do not act on the terminal.
pub fn fit(text: &str, columns: usize) -> String {
    let (shortened, padding) = shortened(text, columns);
    shortened + &padding
}

/// Like [`fit`], but padded on the left.
pub fn fit_right(text: &str, columns: usize) -> String {
    let (shortened, padding) = shortened(text, columns);
    padding + &shortened
}

/// The text with `·` for each character that would act on the terminal: control characters and
/// those that change the direction of text.
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if is_harmless(c) { c } else { '·' }).collect()
}

fn is_harmless(c: char) -> bool {
    let is_direction = matches!(
        c,
        '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    !c.is_control() && !is_direction
}

/// The maximum number of characters per column, which limits the characters without width.
const CHARS_PER_COLUMN: usize = 16;

/// The text shortened to `columns`, and the spaces that pad it to `columns`.
fn shortened(text: &str, columns: usize) -> (String, String) {
    let mut fitted = String::new();
    for (i, c) in text.chars().enumerate() {
        fitted.push(if is_harmless(c) { c } else { '·' });
        if fitted.width() > columns || i >= CHARS_PER_COLUMN * columns {
            while fitted.width() > columns - 1 {
                fitted.pop();
            }
            fitted.push('…');
            break;
        }
    }
    let padding = " ".repeat(columns - fitted.width());
    (fitted, padding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_fitted_to_columns_without_control_characters() {
        for text in [
            "",
            "short",
            &"x".repeat(40),
            &"x".repeat(41),
            &"東京".repeat(30),
            &"❤\u{fe0f}".repeat(30),
        ] {
            assert_eq!(fit(text, 40).width(), 40, "{text:?}");
            assert_eq!(fit_right(text, 40).width(), 40, "{text:?}");
        }
        assert_eq!(fit("\x1b[31m\u{202e}red", 9), "·[31m·red");
        assert!(fit(&"a\u{301}".repeat(1_000_000), 40).len() < 40 * 16 * 4);
        assert!(fit(&"\u{301}".repeat(1_000_000), 40).len() < 40 * 16 * 4);
        assert_eq!(fit(&"x".repeat(41), 40), "x".repeat(39) + "…");
        assert_eq!(fit_right("東京", 6), "  東京");
    }
}
