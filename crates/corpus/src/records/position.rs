//! How far an input has been read, with a hash of the records.

use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use crate::records::record::{
    Fields, HashingWriter, InvalidRecord, Record, text_object_size, write_text_object,
};

/// How far an input has been read.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct InputPosition {
    /// The number of records, invalid ones included.
    pub(crate) read: u64,
    /// A hash of these records.
    hash: u64,
}

impl InputPosition {
    /// The position after one more record.
    pub(crate) fn after(self, record: &Result<Record, InvalidRecord>) -> Self {
        // Run states on disk contain this hash. XXH64 is a fixed function of the bytes, unlike
        // `DefaultHasher`, which may change with the standard library.
        let mut writer = HashingWriter(XxHash64::with_seed(self.hash));
        let hasher = &mut writer.0;
        let mut part = |bytes: &[u8]| {
            hasher.write(&(bytes.len() as u64).to_le_bytes());
            hasher.write(bytes);
        };
        match record {
            Ok(Record { text, fields: Fields::Text, .. }) => {
                part(text.as_bytes());
                // As a part with the object, without a copy of the text.
                hasher.write(&(text_object_size(text) as u64).to_le_bytes());
                write_text_object(&mut writer, text).ok(); // this writer cannot fail
            }
            Ok(Record { text, fields: Fields::Json { open_object, .. }, .. }) => {
                part(text.as_bytes());
                part(open_object.as_bytes());
            }
            Ok(Record { fields: Fields::Row { batch, row }, .. }) => {
                part(&batch.hash.to_le_bytes());
                part(&(*row as u64).to_le_bytes());
            }
            Err(invalid) => part(invalid.to_string().as_bytes()),
        }
        Self { read: self.read + 1, hash: writer.0.finish() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, RecordBatch, StringArray};
    use arrow_schema::ArrowError;

    use super::*;
    use crate::records::record::{RowBatch, Unit};

    #[test]
    fn the_hashes_of_records_do_not_change() {
        let of_line = |_: &str| Fields::Text;
        let of_json = |text: &str| {
            let open_object = format!("{{\"text\":\"{text}\"");
            Fields::Json { open_object, embeddings: vec![] }
        };
        for fields in [of_line as fn(&str) -> Fields, of_json] {
            let records = ["a", "b"].map(|text| {
                let fields = fields(text);
                Ok(Record { text: text.to_string(), unit: Unit::Line, number: 1, fields })
            });
            let first = InputPosition::default().after(&records[0]);
            let second = first.after(&records[1]);
            assert_eq!(
                [first.hash, second.hash],
                [423_814_442_041_782_016, 7_125_784_579_109_028_841]
            );
        }
    }

    /// The hash of a row depends on the hash of its batch as an Arrow IPC stream. If an update of
    /// `arrow-ipc` changes the stream, increase `VERSION` in `resume.rs`.
    #[test]
    fn the_hashes_of_rows_do_not_change() -> Result<(), ArrowError> {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = Arc::new(RowBatch::new(RecordBatch::try_from_iter([("text", texts)])?)?);
        let record = |row| {
            let fields = Fields::Row { batch: batch.clone(), row };
            Ok(Record { text: "a".to_string(), unit: Unit::Row, number: 1, fields })
        };
        let first = InputPosition::default().after(&record(0));
        let second = first.after(&record(1));
        assert_eq!(
            [first.hash, second.hash],
            [13_626_415_463_015_429_843, 16_439_514_768_326_563_235]
        );
        Ok(())
    }
}
