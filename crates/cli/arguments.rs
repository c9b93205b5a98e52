//! Parsers of argument values.

/// A count of at least 1.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number of at least 1".to_string()),
        Ok(count) => Ok(count),
    }
}
