//! File formats and compression, by file extension. Extensions are case-insensitive.

use std::path::Path;

use crate::{Error, InputError};

/// Extensions of unsupported formats. Files with other unknown extensions are read as text lines.
const UNSUPPORTED: [&str; 32] = [
    "7z",
    "avro",
    "br",
    "bz2",
    "db",
    "doc",
    "docx",
    "geojson",
    "gz",
    "gzip",
    "h5",
    "json",
    "lz4",
    "lzma",
    "npy",
    "npz",
    "ods",
    "orc",
    "pdf",
    "pickle",
    "pkl",
    "safetensors",
    "sqlite",
    "tar",
    "tbz2",
    "tgz",
    "xls",
    "xlsx",
    "xz",
    "zip",
    "zst",
    "zstd",
];

encoder::choices! {
    /// The format of a file of records.
    pub enum RecordFormat: "format of records" {
        /// One text per line.
        Lines = "lines",
        /// One JSON object per line.
        Jsonl = "jsonl",
        /// Comma-separated values with a header.
        Csv = "csv",
        /// Tab-separated values with a header.
        Tsv = "tsv",
        /// Apache Parquet.
        Parquet = "parquet",
        /// Arrow IPC, file or stream.
        Arrow = "arrow",
    }
}

encoder::choices! {
    /// The format of a file of vectors. In Parquet and Arrow, the column of the vectors is
    /// `embedding`.
    pub enum VectorFormat: "format of vectors" {
        /// One JSON object per line: {"text": .., "embedding": [..]}; in a file, all fields of the
        /// record.
        Jsonl = "jsonl",
        /// NumPy array, without the records' fields.
        Npy = "npy",
        /// Apache Parquet.
        Parquet = "parquet",
        /// Arrow IPC file.
        Arrow = "arrow",
    }
}

/// The compression of a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstd,
}

/// The extension in lower case, without its dot; empty if the path has none.
fn extension(path: &Path) -> String {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_lowercase()
}

/// The extension of the uncompressed file, and the compression: `csv` and gzip for `in.csv.gz`.
pub(crate) fn compressed_extension(path: &Path) -> (String, Option<Compression>) {
    let compression = match extension(path).as_str() {
        "gz" | "gzip" => Compression::Gzip,
        "zst" | "zstd" => Compression::Zstd,
        other => return (other.to_string(), None),
    };
    (extension(&path.with_extension("")), Some(compression))
}

/// Checks that a file for [`RecordFormat::Arrow`] or [`VectorFormat::Arrow`] is not Feather V1,
/// which has the same extension. `start` has the first bytes of the file.
///
/// # Errors
/// [`InputError::FeatherV1`].
pub(crate) fn refuse_feather_v1(start: &[u8], name: &str) -> Result<(), Error> {
    if start.starts_with(b"FEA1") {
        Err(InputError::FeatherV1 { name: name.to_string() }.into())
    } else {
        Ok(())
    }
}

impl RecordFormat {
    /// The format of a lower-case extension; [`Self::Lines`] if the extension is unknown.
    ///
    /// # Errors
    /// `Err(())` if the extension is in [`UNSUPPORTED`].
    pub(crate) fn from_extension(extension: &str) -> Result<Self, ()> {
        Ok(match extension {
            "jsonl" | "ndjson" => Self::Jsonl,
            "csv" => Self::Csv,
            "tsv" => Self::Tsv,
            "parquet" => Self::Parquet,
            "arrow" | "feather" | "ipc" => Self::Arrow,
            other if UNSUPPORTED.contains(&other) => return Err(()),
            _ => Self::Lines,
        })
    }
}

impl VectorFormat {
    /// The format that the path's extension names: `.jsonl`, `.ndjson`, `.npy`, `.parquet`,
    /// `.arrow`, `.feather` or `.ipc`. `None` for other extensions.
    ///
    /// # Examples
    /// ```
    /// use std::path::Path;
    ///
    /// use corpus::VectorFormat;
    ///
    /// assert_eq!(VectorFormat::from_path(Path::new("a.NPY")), Some(VectorFormat::Npy));
    /// assert_eq!(VectorFormat::from_path(Path::new("a.csv")), None);
    /// ```
    pub fn from_path(path: &Path) -> Option<Self> {
        match extension(path).as_str() {
            "jsonl" | "ndjson" => Some(Self::Jsonl),
            "npy" => Some(Self::Npy),
            "parquet" => Some(Self::Parquet),
            "arrow" | "feather" | "ipc" => Some(Self::Arrow),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_are_case_insensitive() {
        let extension = |name: &str| compressed_extension(Path::new(name));
        assert_eq!(extension("a/U.CSV"), ("csv".to_string(), None));
        assert_eq!(extension("b.Jsonl.GZ"), ("jsonl".to_string(), Some(Compression::Gzip)));
        assert_eq!(extension("c.zst"), (String::new(), Some(Compression::Zstd)));
        assert_eq!(extension("d"), (String::new(), None));
    }

    #[test]
    fn unsupported_formats_are_not_read_as_lines() {
        assert_eq!(RecordFormat::from_extension("log"), Ok(RecordFormat::Lines));
        assert_eq!(RecordFormat::from_extension("json"), Err(()));
        let twice = compressed_extension(Path::new("e.txt.gz.gz")).0;
        assert_eq!(RecordFormat::from_extension(&twice), Err(()), "compressed twice");
    }
}
