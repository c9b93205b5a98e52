//! Arrow IPC files and streams, one record per row.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Cursor, Read, Seek},
};

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::ArrowError;

use crate::{
    Error, InputError, Result,
    catch_panic::catch_panic,
    format::refuse_feather_v1,
    records::{batches, stream::Records},
};

/// The first bytes of an Arrow IPC file. A stream does not start with them.
const FILE_MAGIC: &[u8] = b"ARROW1";

/// Reads the rows of an Arrow IPC file or stream. If `file` is `None`, reads a stream from standard
/// input. A stream may come from a pipe. The column `column` contains the texts.
///
/// # Errors
/// [`InputError::Read`] if the file cannot be read; [`InputError::Arrow`] if the file is not Arrow
/// IPC; [`InputError::FeatherV1`] if it is Feather V1; [`InputError::ArrowStream`] if standard
/// input is not an Arrow IPC stream, or if a pipe contains the file format; the errors of
/// [`batches::read`].
pub(crate) fn read(file: Option<File>, name: &str, column: &str) -> Result<Records> {
    let stream_error =
        |source| Error::Input(InputError::ArrowStream { name: name.to_string(), source });
    let read_error = |source| Error::Input(InputError::Read { name: name.to_string(), source });
    let Some(mut file) = file else {
        let mut input = BufReader::new(io::stdin());
        refuse_feather_v1(input.fill_buf().map_err(read_error)?, name)?;
        let input = WholeMessages(input);
        let reader = catch_panic(|| StreamReader::try_new(input, None)).map_err(stream_error)?;
        return batches::read(reader.schema(), WholeStream(reader), name, column);
    };
    let error = |source| Error::Input(InputError::Arrow { name: name.to_string(), source });
    let mut start = vec![];
    (&file).take(FILE_MAGIC.len() as u64).read_to_end(&mut start).map_err(read_error)?;
    refuse_feather_v1(&start, name)?;
    if start == FILE_MAGIC {
        // A pipe cannot be rewound: it must contain a stream.
        file.rewind().map_err(|error| stream_error(error.into()))?;
        let file = BufReader::with_capacity(1 << 16, file);
        let reader = catch_panic(|| FileReader::try_new(file, None)).map_err(error)?;
        return batches::read(reader.schema(), reader, name, column);
    }
    let input = Cursor::new(start).chain(BufReader::with_capacity(1 << 16, file));
    let input = WholeMessages(input);
    let reader = catch_panic(|| StreamReader::try_new(input, None)).map_err(error)?;
    batches::read(reader.schema(), WholeStream(reader), name, column)
}

/// A reader that reports an input that ends within the length of a message. `arrow-ipc` 60.1 takes
/// [`io::ErrorKind::UnexpectedEof`] there for the end of the stream.
struct WholeMessages<R>(R);

impl<R: Read> Read for WholeMessages<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.0.read(&mut buffer[filled..]) {
                Ok(0) if filled == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(0) => return Err(io::Error::other("the stream ends within a message")),
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The batches of a stream. Bytes after the end of the stream are an error.
struct WholeStream<R: Read>(StreamReader<WholeMessages<R>>);

impl<R: Read> Iterator for WholeStream<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().or_else(|| match self.0.get_mut().read_exact(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => Some(Err(error.into())),
            Ok(()) => Some(Err(ArrowError::IpcError(
                "the input continues after the end of the stream: expected one stream".to_string(),
            ))),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, sync::Arc};

    use arrow_array::{ArrayRef, StringArray};
    use arrow_ipc::writer::StreamWriter;

    use super::*;

    fn stream() -> Result<Vec<u8>, ArrowError> {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let rows = RecordBatch::try_from_iter([("text", texts)])?;
        let mut writer = StreamWriter::try_new(vec![], &rows.schema())?;
        writer.write(&rows)?;
        writer.into_inner()
    }

    /// The number of records of a file with these bytes, and the error after them.
    fn read_bytes(bytes: &[u8]) -> io::Result<(usize, Option<String>)> {
        let mut file = tempfile::tempfile()?;
        file.write_all(bytes)?;
        file.rewind()?;
        let records: Vec<_> = read(Some(file), "a.arrow", "text").unwrap().collect();
        let error = records.iter().find_map(|record| Some(record.as_ref().err()?.to_string()));
        Ok((records.iter().filter(|record| record.is_ok()).count(), error))
    }

    #[test]
    fn a_stream_may_end_without_its_end_marker() -> Result<(), ArrowError> {
        let stream = stream()?;
        assert_eq!(read_bytes(&stream)?, (2, None));
        assert_eq!(read_bytes(&stream[..stream.len() - 8])?, (2, None));
        Ok(())
    }

    #[test]
    fn a_partial_message_and_a_second_stream_are_errors() -> Result<(), ArrowError> {
        let stream = stream()?;
        for rest in 1..8 {
            let (records, error) = read_bytes(&stream[..stream.len() - rest])?;
            assert_eq!((records, error.is_some()), (2, true), "{rest}");
        }
        let (records, error) = read_bytes(&stream.repeat(2))?;
        assert_eq!(records, 2);
        let error = error.unwrap_or_default();
        assert!(error.contains("continues after the end of the stream"), "{error}");
        Ok(())
    }
}
