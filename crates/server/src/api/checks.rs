//! The limits on texts, numbers and responses that many routes share.

use crate::{
    Limits,
    failure::{Failure, Kind},
};

/// The name of a text in errors, for a field that is a list.
pub fn text_name(index: usize) -> String {
    format!("text {index}")
}

/// # Errors
/// [`Kind::Empty`] for no texts; [`Kind::TooLarge`] for more than [`Limits::max_texts`].
pub fn check_count(limits: &Limits, count: usize, field: &str) -> Result<(), Failure> {
    let max = limits.max_texts;
    if count == 0 {
        let message = format!("{field} is empty: expected at least one element");
        return Err(Failure::new(Kind::Empty, message).with_field(field));
    }
    if count > max {
        let message =
            format!("{field} has {count} elements: expected at most {max}; send several requests");
        return Err(Failure::new(Kind::TooLarge, message).with_field(field));
    }
    Ok(())
}

/// # Errors
/// [`Kind::Invalid`] if the field, a number of results, is 0.
pub fn check_top(field: &str, top: Option<usize>) -> Result<(), Failure> {
    if top == Some(0) {
        return Err(Failure::invalid(field, format!("{field} is 0: expected at least 1")));
    }
    Ok(())
}

/// Checks that the request lacks a field that the server does not implement. `advice` tells the
/// client what to do instead.
///
/// # Errors
/// [`Kind::Invalid`] if there is a value.
pub fn check_absent<T>(field: &str, value: Option<T>, advice: &str) -> Result<(), Failure> {
    if value.is_some() {
        return Err(Failure::invalid(field, format!("{field} is not supported: {advice}")));
    }
    Ok(())
}

/// Maximum number of values of a response.
const MAX_VALUES: usize = 1 << 24;

/// # Errors
/// [`Kind::TooLarge`] for a response of more than [`MAX_VALUES`] values.
pub fn check_response(values: usize, field: &str) -> Result<(), Failure> {
    if values > MAX_VALUES {
        let message = format!(
            "the response would have {values} values: expected at most {MAX_VALUES}; send fewer \
             or shorter texts, or lower top if the request has it"
        );
        return Err(Failure::new(Kind::TooLarge, message).with_field(field));
    }
    Ok(())
}

/// Maximum size of a query, of a question, and of a text of the tasks of the command `encodle`, in
/// bytes.
const MAX_UNBATCHED_BYTES: usize = 64 << 10;

/// # Errors
/// [`Kind::TooLarge`] for a text of more than [`MAX_UNBATCHED_BYTES`]; the message calls it `name`.
pub fn check_size(name: &str, text: &str) -> Result<(), Failure> {
    let got = text.len();
    if got > MAX_UNBATCHED_BYTES {
        let message = format!("{name} has {got} bytes: expected at most {MAX_UNBATCHED_BYTES}");
        return Err(Failure::new(Kind::TooLarge, message));
    }
    Ok(())
}

/// The failure for a text that is too long and may not be truncated. `got` is the number of its
/// tokens that were counted: the rest of a long text is not tokenized.
pub fn long_text_failure(name: &str, got: usize, max: usize) -> Failure {
    let message = format!(
        "{name} has at least {got} tokens: expected at most {max}; shorten it, leave out truncate: \
         false (routes of text-embeddings-inference), or set auto_truncate in the server \
         (/v1/embeddings)"
    );
    Failure::new(Kind::TooLarge, message)
}
