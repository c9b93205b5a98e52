//! Converts panics of the readers of Parquet and Arrow to errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::ParquetError;

/// Calls `read`, which reads a file, and returns a panic as an error: `parquet` and `arrow-ipc`
/// 60.1 panic on some damaged files. Do not use the reader after a panic.
pub(crate) fn catch_panic<T, E: From<ParquetError>>(
    read: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(ParquetError::General(format!("the file is damaged: the reader panicked: {text}"))
            .into())
    })
}

/// The items of a reader. A panic is returned as an error. The first error ends the iterator.
pub(crate) fn catch_panics<T, E: From<ParquetError>>(
    reader: impl Iterator<Item = Result<T, E>>,
) -> impl Iterator<Item = Result<T, E>> {
    let mut reader = Some(reader);
    std::iter::from_fn(move || {
        let mut current = reader.take()?;
        let item = catch_panic(|| current.next().transpose()).transpose();
        if matches!(item, Some(Ok(_))) {
            reader = Some(current);
        }
        item
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_ends_the_iterator() {
        let items = (0..3).map(|i| match i {
            0 => Ok::<_, ParquetError>(i),
            _ => panic!("index {i}"),
        });
        let mut items = catch_panics(items);
        assert_eq!(items.next().unwrap().unwrap(), 0);
        let error = items.next().unwrap().unwrap_err().to_string();
        assert!(error.ends_with("the file is damaged: the reader panicked: index 1"), "{error}");
        assert!(items.next().is_none());
    }
}
