//! The records of an input, one after another.

use std::{
    collections::HashSet,
    fmt, iter, mem,
    sync::{Arc, atomic::AtomicU64},
};

use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::{
    InputError, Result, ResumeError,
    records::{
        position::InputPosition,
        record::{Fields, InvalidRecord, Record, Unit},
    },
};

/// A record, or the error of an invalid one.
pub(crate) type ReadRecord = std::result::Result<Record, InvalidRecord>;

/// An iterator over the records of an input. After an [`InvalidRecord`] that is not
/// [fatal](InvalidRecord::is_fatal) it continues with the next record.
pub struct Records {
    /// The columns of a table of the records. `None` for JSON objects: their columns are known only
    /// when all objects have been read.
    pub(crate) schema: Option<SchemaRef>,
    total: Option<u64>,
    blank_lines: Arc<AtomicU64>,
    records: Box<dyn Iterator<Item = ReadRecord> + Send>,
}

/// Prints the number of records (if known) instead of the records.
impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").field("total", &self.total).finish_non_exhaustive()
    }
}

impl Records {
    pub(crate) fn new(
        schema: Option<SchemaRef>,
        records: impl Iterator<Item = ReadRecord> + Send + 'static,
    ) -> Self {
        // Fused, because a terminal can return more data after the end of the input.
        let records = Box::new(records.fuse());
        Self { schema, total: None, blank_lines: Arc::default(), records }
    }

    pub(crate) fn with_total(self, total: Option<u64>) -> Self {
        Self { total, ..self }
    }

    /// Sets the counter that the iterator increments for each blank line.
    pub(crate) fn with_blank_lines(self, blank_lines: Arc<AtomicU64>) -> Self {
        Self { blank_lines, ..self }
    }

    /// One record per text.
    pub(crate) fn of_texts(texts: Vec<String>) -> Self {
        let total = texts.len() as u64;
        let records = texts.into_iter().zip(1..).map(|(text, number)| {
            Ok(Record { text, unit: Unit::Item, number, fields: Fields::Text })
        });
        Self::new(Some(string_columns(["text"])), records).with_total(Some(total))
    }

    /// The number of records, if the input stores this number.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// The counter of the blank JSONL lines that were skipped so far.
    pub(crate) fn blank_line_counter(&self) -> Arc<AtomicU64> {
        self.blank_lines.clone()
    }

    /// Calls `f` with the next `count` records, which stay in the iterator.
    pub(crate) fn peek<T>(&mut self, count: usize, f: impl FnOnce(&[ReadRecord]) -> T) -> T {
        let next: Vec<ReadRecord> = self.records.by_ref().take(count).collect();
        let result = f(&next);
        let rest = mem::replace(&mut self.records, Box::new(iter::empty()));
        self.records = Box::new(next.into_iter().chain(rest));
        result
    }

    /// Skips the records that an interrupted run has read.
    ///
    /// # Errors
    /// [`crate::Error::InvalidRecord`] if the input cannot be read; [`ResumeError::InputShorter`]
    /// if it has fewer records; [`ResumeError::InputChanged`] if its first records differ from
    /// these.
    pub(crate) fn skip_to(&mut self, position: InputPosition) -> Result<()> {
        let mut reached = InputPosition::default();
        for got in 0..position.read {
            let record = match self.next() {
                Some(Err(invalid)) if invalid.is_fatal() => return Err(invalid.into()),
                Some(record) => record,
                None => {
                    return Err(ResumeError::InputShorter { expected: position.read, got }.into());
                }
            };
            reached = reached.after(&record);
        }
        if reached == position {
            Ok(())
        } else {
            Err(ResumeError::InputChanged { records: position.read }.into())
        }
    }
}

impl Iterator for Records {
    type Item = ReadRecord;

    fn next(&mut self) -> Option<ReadRecord> {
        self.records.next()
    }
}

/// The schema of columns of strings.
pub(crate) fn string_columns<'a>(names: impl IntoIterator<Item = &'a str>) -> SchemaRef {
    let fields = names.into_iter().map(|name| Field::new(name, DataType::Utf8, false));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Checks that all columns have distinct names.
///
/// # Errors
/// [`InputError::DuplicateColumn`] if two names are equal.
pub(crate) fn check_distinct<'a>(name: &str, columns: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut seen = HashSet::new();
    for column in columns {
        if !seen.insert(column) {
            let (name, column) = (name.to_string(), column.to_string());
            return Err(InputError::DuplicateColumn { name, column }.into());
        }
    }
    Ok(())
}
