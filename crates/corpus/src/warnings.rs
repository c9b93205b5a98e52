//! Messages about values that a run changed or left out.

use crate::{AsText, NonFinite};

/// A message for each column with NaN and infinite values, which were written as null.
///
/// # Examples
/// ```
/// let columns = [("price".to_string(), 2)].into();
/// assert_eq!(
///     corpus::warnings::non_finite(&columns),
///     ["column \"price\": 2 NaN or infinite values were written as null"]
/// );
/// ```
pub fn non_finite(columns: &NonFinite) -> Vec<String> {
    let message = |(column, count): (&String, &u64)| {
        let values = if *count == 1 { "value was" } else { "values were" };
        format!("column {column:?}: {count} NaN or infinite {values} written as null")
    };
    columns.iter().map(message).collect()
}

/// A message that blank lines of an input were skipped; `None` if there were none.
///
/// # Examples
/// ```
/// let message = corpus::warnings::blank_lines("in.jsonl", 1);
/// assert_eq!(message.as_deref(), Some("in.jsonl: 1 blank line was skipped"));
/// ```
pub fn blank_lines(input: &str, count: u64) -> Option<String> {
    match count {
        0 => None,
        1 => Some(format!("{input}: 1 blank line was skipped")),
        n => Some(format!("{input}: {n} blank lines were skipped")),
    }
}

/// A message that values of a field are written as text although they are not strings; see
/// [`Event::WrittenAsText`](crate::Event::WrittenAsText).
///
/// # Examples
/// ```
/// use corpus::{AsText, warnings};
///
/// let message = warnings::written_as_text("in.jsonl", "id", AsText::SeveralTypes);
/// assert!(message.ends_with("its numbers and booleans are written as text"));
/// ```
pub fn written_as_text(input: &str, field: &str, reason: AsText) -> String {
    match reason {
        AsText::InexactIntegers => format!(
            "{input}: field {field:?} has integers that a column of numbers (i64, or f64 if the \
             field also has fractions) does not represent exactly: its numbers are written as text"
        ),
        AsText::SeveralTypes => format!(
            "{input}: field {field:?} has values of several types (string, number, boolean): its \
             numbers and booleans are written as text"
        ),
    }
}
