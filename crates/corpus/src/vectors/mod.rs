//! Writes files of vectors with the fields of the records, and searches files of vectors.

mod dtype;
mod file;
mod jsonl;
mod layout;
mod multi;
mod npy;
mod scan;
mod sparse;
mod table;

pub use dtype::VectorDtype;
pub use file::{RowRecords, VectorFile};
pub(crate) use jsonl::json_lines;
pub(crate) use layout::{Layout, LayoutSpec};
pub(crate) use npy::{HEADER_LENGTH, header};
pub(crate) use table::{encode_batches, write_file};
