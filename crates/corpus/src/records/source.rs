//! The source of records.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use flate2::read::MultiGzDecoder;

use crate::{
    Error, InputError, RecordFormat, Result,
    format::{Compression, compressed_extension},
    records::{arrow, csv, jsonl, lines, parquet, stream::Records},
};

/// A source of records: a file, standard input or a list of texts.
///
/// The extension of a file determines its format: `.jsonl`, `.ndjson`, `.csv`, `.tsv`, `.parquet`,
/// `.arrow`, `.feather` or `.ipc`. Files with other extensions are read as text lines, except known
/// unsupported formats such as `.json`, which are refused. Text formats may be compressed as `.gz`
/// or `.zst`.
///
/// # Examples
/// ```
/// use corpus::{Error, InputError, RecordFormat, RecordSource};
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("records.log");
/// std::fs::write(&path, "{\"body\": \"a\"}\n{\"id\": 1}\n")?;
/// let source = RecordSource::file(&path).with_format(RecordFormat::Jsonl).with_field("body");
/// let mut records = source.open()?;
/// assert_eq!(records.next().unwrap()?.text(), "a");
/// let invalid = records.next().unwrap().unwrap_err();
/// assert!(invalid.to_string().ends_with("object has no field \"body\": its fields are [\"id\"]"));
/// assert!(records.next().is_none());
///
/// let other = RecordSource::texts(["a text".to_string()]).with_field("title");
/// assert!(matches!(other.open(), Err(Error::Input(InputError::NoColumn { .. }))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct RecordSource {
    origin: Origin,
    format: Option<RecordFormat>,
    field: Option<String>,
}

#[derive(Clone, Debug)]
enum Origin {
    Stdin,
    File(PathBuf),
    Texts(Arc<[String]>),
}

impl RecordSource {
    /// Reads a file.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { origin: Origin::File(path.into()), format: None, field: None }
    }

    /// Reads standard input, as text lines unless [`Self::with_format`] is called.
    pub fn stdin() -> Self {
        Self { origin: Origin::Stdin, format: None, field: None }
    }

    /// Uses texts as records with the field `text`.
    pub fn texts(texts: impl Into<Arc<[String]>>) -> Self {
        Self { origin: Origin::Texts(texts.into()), format: None, field: None }
    }

    /// Reads the input in this format instead of the extension's format. The extensions `.gz` and
    /// `.zst` still determine the compression.
    pub fn with_format(self, format: RecordFormat) -> Self {
        Self { format: Some(format), ..self }
    }

    /// Uses the field or column of this name as text. The default is `text`.
    pub fn with_field(self, field: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..self }
    }

    /// The name of the input in messages.
    pub fn name(&self) -> String {
        match &self.origin {
            Origin::Stdin => "standard input".to_string(),
            Origin::File(path) => path.display().to_string(),
            Origin::Texts(_) => "the list of texts".to_string(),
        }
    }

    /// The path, if the source is a file.
    pub fn path(&self) -> Option<&Path> {
        match &self.origin {
            Origin::File(path) => Some(path),
            _ => None,
        }
    }

    /// The properties of the source that the run state stores. They do not depend on the spelling
    /// of a path.
    ///
    /// # Errors
    /// [`InputError::UnsupportedExtension`], [`InputError::CompressedTable`].
    pub(crate) fn settings(&self) -> Result<String> {
        let path = self.path().and_then(|path| path.canonicalize().ok());
        let name = path.map_or_else(|| self.name(), |path| path.display().to_string());
        let format = self.format()?.0;
        let field = self.field.as_deref().unwrap_or("text");
        Ok(format!("{name} (format {format}, field {field:?})"))
    }

    /// Whether the source can be read only once.
    pub(crate) fn is_stream(&self) -> bool {
        match &self.origin {
            Origin::Stdin => true,
            Origin::File(path) => !path.is_file(),
            Origin::Texts(_) => false,
        }
    }

    /// The format (the requested one, otherwise the extension's) and the compression.
    fn format(&self) -> Result<(RecordFormat, Option<Compression>)> {
        let path = self.path().unwrap_or(Path::new(""));
        let (extension, compression) = compressed_extension(path);
        let format = match self.format {
            Some(format) => format,
            None => RecordFormat::from_extension(&extension).map_err(|()| {
                Error::Input(InputError::UnsupportedExtension {
                    name: self.name(),
                    extension: extension.clone(),
                })
            })?,
        };
        if compression.is_some() && matches!(format, RecordFormat::Parquet | RecordFormat::Arrow) {
            return Err(InputError::CompressedTable { name: self.name() }.into());
        }
        Ok((format, compression))
    }

    /// Opens the input at its first record.
    ///
    /// # Errors
    /// - [`InputError::UnsupportedExtension`], [`InputError::CompressedTable`] if the extension is
    ///   not supported
    /// - [`InputError::NoFields`] if a field was chosen and the format is text lines
    /// - [`InputError::Read`] if the file cannot be opened, or is a folder
    /// - [`InputError::ParquetStream`] if the format is Parquet and the input is standard input or
    ///   another stream
    /// - [`InputError::Csv`], [`InputError::Parquet`], [`InputError::Arrow`],
    ///   [`InputError::ArrowStream`], [`InputError::FeatherV1`] if the content is not in the
    ///   input's format; [`Error::InvalidRecord`] if a quote in the header of a CSV file is not
    ///   closed
    /// - [`InputError::NoColumn`] or [`InputError::NotText`] if the text column is missing or does
    ///   not contain strings; [`InputError::NoColumn`] also if a field other than `text` was chosen
    ///   for a list of texts; [`InputError::DuplicateColumn`] if two columns have the same name
    pub fn open(&self) -> Result<Records> {
        if let Origin::Texts(texts) = &self.origin {
            return match self.field.as_deref() {
                None | Some("text") => Ok(Records::of_texts(texts.to_vec())),
                Some(field) => Err(InputError::NoColumn {
                    name: self.name(),
                    expected: field.to_string(),
                    got: vec!["text".to_string()],
                }
                .into()),
            };
        }
        let (name, (format, compression)) = (self.name(), self.format()?);
        let field = self.field.clone().unwrap_or_else(|| "text".to_string());
        if format == RecordFormat::Lines && self.field.is_some() {
            return Err(InputError::NoFields { name }.into());
        }
        let unreadable = |source| Error::Input(InputError::Read { name: name.clone(), source });
        let file = self.path().map(File::open).transpose().map_err(unreadable)?;
        if self.path().is_some_and(Path::is_dir) {
            return Err(unreadable(io::ErrorKind::IsADirectory.into()));
        }
        let bytes = |file| decompressed(file, compression).map_err(unreadable);
        match format {
            RecordFormat::Lines => Ok(lines::read(bytes(file)?, name.clone())),
            RecordFormat::Jsonl => Ok(jsonl::read(bytes(file)?, name.clone(), field)),
            RecordFormat::Csv => csv::read(bytes(file)?, b',', name.clone(), field),
            RecordFormat::Tsv => csv::read(bytes(file)?, b'\t', name.clone(), field),
            RecordFormat::Parquet => match file.filter(|_| !self.is_stream()) {
                Some(file) => parquet::read(file, &name, &field),
                None => Err(InputError::ParquetStream { name }.into()),
            },
            RecordFormat::Arrow => arrow::read(file, &name, &field),
        }
    }

    /// Estimates the number of records by the number of lines. The estimate is too large if a CSV
    /// value contains a line break or if CSV or JSONL contains blank lines, and too small if the
    /// rows of a CSV file end in CR without LF. `None` for texts, streams, Parquet, Arrow and
    /// compressed files, for extensions that are not supported, and if the file cannot be read.
    pub fn count_lines(&self) -> Option<u64> {
        let header = match self.format().ok()? {
            (_, Some(_)) | (RecordFormat::Parquet | RecordFormat::Arrow, _) => return None,
            (RecordFormat::Lines | RecordFormat::Jsonl, None) => 0,
            (RecordFormat::Csv | RecordFormat::Tsv, None) => 1,
        };
        if self.is_stream() {
            return None;
        }
        let mut file = BufReader::with_capacity(1 << 20, File::open(self.path()?).ok()?);
        let (mut lines, mut last) = (0, b'\n');
        loop {
            let read = file.fill_buf().ok()?;
            let Some(&end) = read.last() else {
                lines += u64::from(last != b'\n');
                return Some(u64::saturating_sub(lines, header));
            };
            last = end;
            lines += read.iter().filter(|&&byte| byte == b'\n').count() as u64;
            let length = read.len();
            file.consume(length);
        }
    }
}

/// The uncompressed bytes of a file, or the bytes of standard input if `file` is `None`.
fn decompressed(
    file: Option<File>,
    compression: Option<Compression>,
) -> io::Result<Box<dyn Read + Send>> {
    Ok(match (file, compression) {
        (None, _) => Box::new(io::stdin()),
        (Some(file), None) => Box::new(file),
        (Some(file), Some(Compression::Gzip)) => {
            Box::new(MultiGzDecoder::new(BufReader::new(file)))
        }
        (Some(file), Some(Compression::Zstd)) => Box::new(zstd::Decoder::new(file)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::record::{Fields, Record, text_object};

    /// Each record of a file as `text | JSON object without its closing brace`, or the error.
    fn read(file: &str, content: &[u8], field: Option<&str>) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(file);
        std::fs::write(&path, content).unwrap();
        let relative = |text: String| text.replace(&format!("{}/", dir.path().display()), "");
        let mut source = RecordSource::file(path);
        source.field = field.map(String::from);
        match source.open() {
            Err(error) => vec![relative(error.to_string())],
            Ok(records) => records
                .map(|record| match record {
                    Ok(Record { text, fields: Fields::Json { open_object, .. }, .. }) => {
                        format!("{text} | {open_object}")
                    }
                    Ok(Record { text, fields: Fields::Text, .. }) => {
                        format!("{text} | {}", text_object(&text))
                    }
                    Ok(Record { fields: Fields::Row { .. }, .. }) => {
                        panic!("expected a JSON record, got a table row")
                    }
                    Err(invalid) => relative(invalid.to_string()),
                })
                .collect(),
        }
    }

    #[test]
    fn lines_become_records() {
        assert_eq!(
            read("a.txt", b"one\r\n\ntw\"o", None),
            ["one | {\"text\":\"one\"", " | {\"text\":\"\"", "tw\"o | {\"text\":\"tw\\\"o\""]
        );
        assert_eq!(read("a.txt", b"\xef\xbb\xbfone\n", None), ["one | {\"text\":\"one\""]);
        assert_eq!(
            read("a.txt", b"na\xefve\n", None),
            ["a.txt, line 1: expected UTF-8, got an invalid byte at position 3"]
        );
        assert_eq!(
            read("a.txt", b"", Some("x")),
            ["a.txt contains text lines, which have no fields: expected a .jsonl, .ndjson, .csv, \
              .tsv, .parquet or .arrow file"]
        );
    }

    #[test]
    fn json_objects_become_records() {
        assert_eq!(
            read(
                "a.jsonl",
                b"{\"id\": 1, \"text\": \"x\"}\n[]\n{\"id\": 2}\n{\"text\": 3}\n{}\n{\n",
                None
            ),
            [
                "x | {\"id\": 1, \"text\": \"x\"",
                "a.jsonl, line 2: expected a JSON object, got a list",
                "a.jsonl, line 3: object has no field \"text\": its fields are [\"id\"]",
                "a.jsonl, line 4: expected a string in \"text\", got 3",
                "a.jsonl, line 5: object has no field \"text\": it has no fields",
                "a.jsonl, line 6: cannot be parsed as a JSON object: EOF while parsing an object at column 1",
            ]
        );
    }

    #[test]
    fn csv_rows_become_records() {
        assert_eq!(
            read("a.csv", b"id,body\n1,\"two\nlines\"\n2\n", Some("body")),
            [
                "two\nlines | {\"id\":\"1\",\"body\":\"two\\nlines\"",
                "a.csv, line 4: expected 2 fields, as in the first row, got 1",
            ]
        );
        assert_eq!(
            read("a.csv", b"text,id,id\na,1,2\n", None),
            ["a.csv has two columns \"id\": expected distinct names"]
        );
        assert_eq!(
            read("a.csv", b"id\n", None),
            ["a.csv has no column \"text\": its columns are [\"id\"]"]
        );
    }
}
