//! Arrow IPC files and streams, one record per row.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek},
};

use arrow_ipc::reader::{FileReader, StreamReader};

use crate::{
    Error, Result,
    records::{batches, stream::Records},
};

/// The first bytes of an Arrow IPC file. A stream does not start with them.
const FILE_MAGIC: &[u8] = b"ARROW1";

/// Reads the rows of an Arrow IPC file or stream. If `file` is `None`, reads a stream from standard
/// input. The column `column` contains the texts.
///
/// # Errors
/// [`Error::Arrow`] or [`Error::ArrowStream`] if the input is not Arrow IPC; the errors of
/// [`batches::read`].
pub(crate) fn read(file: Option<File>, name: &str, column: &str) -> Result<Records> {
    let Some(mut file) = file else {
        let reader = StreamReader::try_new(BufReader::new(io::stdin()), None);
        let reader =
            reader.map_err(|source| Error::ArrowStream { name: name.to_string(), source })?;
        return batches::read(reader.schema(), reader, name, column);
    };
    let error = |source| Error::Arrow { name: name.to_string(), source };
    let mut start = vec![];
    let read = (&file).take(FILE_MAGIC.len() as u64).read_to_end(&mut start);
    read.and_then(|_| file.rewind()).map_err(|source| error(source.into()))?;
    let file = BufReader::with_capacity(1 << 16, file);
    if start == FILE_MAGIC {
        let reader = FileReader::try_new(file, None).map_err(error)?;
        return batches::read(reader.schema(), reader, name, column);
    }
    let reader = StreamReader::try_new(file, None).map_err(error)?;
    batches::read(reader.schema(), reader, name, column)
}
