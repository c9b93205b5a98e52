//! Records of an input: a text each, and the fields that it was read with.

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
pub(crate) use record::Fields;
pub use record::{InvalidRecord, InvalidRecordKind, Record, Unit};
pub use source::RecordSource;
pub use stream::Records;
