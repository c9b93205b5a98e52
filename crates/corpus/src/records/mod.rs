//! Reads the records of an input. A record is a text and the fields of its line or row.

mod arrow;
mod batches;
mod csv;
mod jsonl;
mod lines;
mod parquet;
mod position;
mod record;
mod source;
mod stream;

pub(crate) use position::InputPosition;
pub(crate) use record::{
    Fields, csv_message, list_names, text_object, text_object_size, write_text_object,
};
pub use record::{InvalidRecord, InvalidRecordKind, Record, Unit};
pub use source::RecordSource;
pub use stream::Records;
