//! Arrow IPC files and streams, one record per row.

use std::{
    fs::File,
    io::{self, BufReader, Cursor, Read, Seek},
};

use arrow_ipc::reader::{FileReader, StreamReader};

use crate::{
    Error, Result,
    catch_panic::catch_panic,
    records::{batches, stream::Records},
};

/// The first bytes of an Arrow IPC file. A stream does not start with them.
const FILE_MAGIC: &[u8] = b"ARROW1";

/// Reads the rows of an Arrow IPC file or stream. If `file` is `None`, reads a stream from standard
/// input. A stream may come from a pipe. The column `column` contains the texts.
///
/// # Errors
/// [`Error::Read`] if the file cannot be read; [`Error::Arrow`] if the file is not Arrow IPC;
/// [`Error::ArrowStream`] if standard input is not an Arrow IPC stream, or if a pipe contains the
/// file format; the errors of [`batches::read`].
pub(crate) fn read(file: Option<File>, name: &str, column: &str) -> Result<Records> {
    let stream_error = |source| Error::ArrowStream { name: name.to_string(), source };
    let Some(mut file) = file else {
        let reader = catch_panic(|| StreamReader::try_new(BufReader::new(io::stdin()), None));
        let reader = reader.map_err(stream_error)?;
        return batches::read(reader.schema(), reader, name, column);
    };
    let error = |source| Error::Arrow { name: name.to_string(), source };
    let mut start = vec![];
    let read_error = |source| Error::Read { name: name.to_string(), source };
    (&file).take(FILE_MAGIC.len() as u64).read_to_end(&mut start).map_err(read_error)?;
    if start == FILE_MAGIC {
        // A pipe cannot be rewound: it must contain a stream.
        file.rewind().map_err(|error| stream_error(error.into()))?;
        let file = BufReader::with_capacity(1 << 16, file);
        let reader = catch_panic(|| FileReader::try_new(file, None)).map_err(error)?;
        return batches::read(reader.schema(), reader, name, column);
    }
    let stream = Cursor::new(start).chain(BufReader::with_capacity(1 << 16, file));
    let reader = catch_panic(|| StreamReader::try_new(stream, None)).map_err(error)?;
    batches::read(reader.schema(), reader, name, column)
}
