//! Embeds files of records into files of vectors, and searches the vectors exactly.
//!
//! 1. [`RecordSource`] reads [`Record`]s from text lines, JSONL, CSV, TSV, Parquet and Arrow IPC;
//!    text files may be compressed with gzip or zstd.
//! 2. [`EmbedRun`] embeds the records with an [`encoder::Embedder`] and writes the vectors to
//!    Parquet, Arrow IPC or JSONL with all fields of the records, or to `.npy` without the fields.
//!    An interrupted run can be resumed. [`embed_records`] passes the vectors to a function
//!    instead. Rows other than vectors implement [`StoredColumn`].
//! 3. [`VectorFile`] reads the vectors back and searches them: dense ones by cosine, sparse ones by
//!    their dot products, a vector per token by MaxSim.
//!
//! The library prints nothing. [`EmbedRun::run`] reports progress as [`Event`]s and returns a
//! [`Summary`]. The error type is [`Error`]; the iterator [`Records`] yields a [`Record`]
//! or an [`InvalidRecord`].
//!
//! # Examples
//! Embed two records, and search for a third text:
//! ```
//! use corpus::{EmbedRun, RecordSource, VectorFile};
//! use encoder::{EmbedOptions, Embedder, LoadOptions, Prompt, Search};
//!
//! let model = "../../weights/all-MiniLM-L6-v2";
//! let embedder = Embedder::from_dir(model, &LoadOptions::default())?;
//! let dir = tempfile::tempdir()?;
//! let (input, output) = (dir.path().join("texts.csv"), dir.path().join("vectors.parquet"));
//! std::fs::write(&input, "id,text\n7,A man is eating food.\n8,It snows.\n")?;
//!
//! let run = EmbedRun::new(RecordSource::file(&input), &output)?;
//! let summary = run.run(&embedder, EmbedOptions::default(), |_event| {})?;
//! assert_eq!(summary.written, 2);
//!
//! let vectors = VectorFile::open(&output)?;
//! let options = EmbedOptions::new().with_prompt(Prompt::Query);
//! let query = embedder.embed_with(&["A man eats."], options)?.vectors.to_vec2()?;
//! let hits = vectors.scan(&Search::new(&query, 1)?)?.into_hits();
//! assert_eq!(hits[0][0].row, 0);
//! assert!(hits[0][0].score > 0.8);
//! let found = vectors.records(&[0].into(), None)?;
//! assert_eq!(found.json[&0], r#"{"id":"7","text":"A man is eating food."}"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)] // with one exception: memory-mapping a file

mod catch_panic;
mod chunks;
mod columns;
mod error;
mod format;
mod output_path;
mod partial;
mod records;
mod resume;
mod rows;
mod run;
mod vectors;
pub mod warnings;

pub use columns::{AsText, NonFinite, ValueMismatch};
pub use error::{Error, InputError, OutputError, Result, ResumeError, VectorsError};
pub use format::{RecordFormat, VectorFormat};
pub use output_path::output_path;
pub use records::{InvalidRecord, InvalidRecordKind, Record, RecordSource, Records, Unit};
pub use rows::{StoredColumn, StoredRow};
pub use run::{EmbedRun, Event, OnInvalid, Summary, embed_records};
pub use vectors::{RowRecords, VectorDtype, VectorFile};

/// The name of the field or column of vectors.
const EMBEDDING: &str = "embedding";

/// The names of the fields or columns of rows of all kinds.
const ALL_EMBEDDINGS: [&str; 3] = [EMBEDDING, "sparse_embedding", "multi_vector_embedding"];
