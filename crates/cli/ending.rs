//! File formats by the extensions of file names, which are case-insensitive.

use std::path::Path;

/// Endings of formats that hold texts or vectors and that no command reads.
const UNREADABLE: [&str; 32] = [
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

/// How the bytes of a file are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Gzip,
    Zstd,
}

/// The ending of a file's name in lower case, without its dot; empty if there is none.
pub fn ending(path: &Path) -> String {
    path.extension().and_then(|ending| ending.to_str()).unwrap_or_default().to_lowercase()
}

/// `in.csv.gz` is a CSV file in gzip: the ending of what is compressed, and how it is compressed.
pub fn compressed(path: &Path) -> (String, Option<Compression>) {
    let compression = match ending(path).as_str() {
        "gz" | "gzip" => Compression::Gzip,
        "zst" | "zstd" => Compression::Zstd,
        other => return (other.to_string(), None),
    };
    (ending(&path.with_extension("")), Some(compression))
}

/// Whether an ending names a format that cannot be read, so that reading it by lines is a mistake.
pub fn is_unreadable(ending: &str) -> bool {
    UNREADABLE.contains(&ending)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_compared_without_case() {
        let of = |name: &str| compressed(Path::new(name));
        assert_eq!(of("a/U.CSV"), ("csv".to_string(), None));
        assert_eq!(of("b.Jsonl.GZ"), ("jsonl".to_string(), Some(Compression::Gzip)));
        assert_eq!(of("c.zst"), (String::new(), Some(Compression::Zstd)));
        assert_eq!(of("d"), (String::new(), None));
        assert!(is_unreadable("json") && !is_unreadable("log"));
        assert!(is_unreadable(&of("e.txt.gz.gz").0), "compressed twice");
    }
}
