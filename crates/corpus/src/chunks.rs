//! A pipeline that reads, embeds and writes chunks of records.
//!
//! Three threads work on successive chunks: while the writer thread writes chunk i, the calling
//! thread embeds chunk i + 1, and the reader thread reads and tokenizes chunk i + 2.

use std::{
    panic::resume_unwind,
    sync::{
        atomic::AtomicBool,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use encoder::{
    EmbedOptions, Embedder, LongTexts, Prompt, TEXTS_PER_CHUNK, TokenizedTexts, Truncated,
    unless_stopped,
};

use crate::{
    Error, InvalidRecord, Record, Records, Result, partial::PartialOutput, records::InputPosition,
};

/// Records that are read, embedded and written together: [`TEXTS_PER_CHUNK`], invalid ones included.
struct Chunk {
    records: Vec<Record>,
    tokenized: TokenizedTexts,
    /// The position in the input after these records.
    position: InputPosition,
}

/// The invalid records that were skipped, and the chunk, or the error if the chunk cannot be read
/// or tokenized.
type ReadChunk = (Vec<InvalidRecord>, Result<Chunk>);

/// Reads and tokenizes chunks.
pub(crate) struct Reader {
    /// The name of the input in messages.
    name: String,
    records: Records,
    position: InputPosition,
    /// Whether invalid records are skipped.
    skip: bool,
    embedder: Embedder,
    options: OwnedOptions,
}

/// [`EmbedOptions`] that own their prompt.
struct OwnedOptions {
    prompt: String,
    /// Creates the [`Prompt`] from [`Self::prompt`].
    to_prompt: for<'a> fn(&'a str) -> Prompt<'a>,
    long_texts: LongTexts,
}

impl OwnedOptions {
    fn new(options: EmbedOptions) -> Self {
        let (prompt, to_prompt): (&str, for<'a> fn(&'a str) -> Prompt<'a>) = match options.prompt {
            Prompt::Default => ("", |_| Prompt::Default),
            Prompt::None => ("", |_| Prompt::None),
            Prompt::Query => ("", |_| Prompt::Query),
            Prompt::Document => ("", |_| Prompt::Document),
            Prompt::Named(name) => (name, |name| Prompt::Named(name)),
            Prompt::Text(text) => (text, |text| Prompt::Text(text)),
        };
        Self { prompt: prompt.to_string(), to_prompt, long_texts: options.long_texts }
    }

    fn options(&self) -> EmbedOptions<'_> {
        let prompt = (self.to_prompt)(&self.prompt);
        EmbedOptions::new().with_prompt(prompt).with_long_texts(self.long_texts)
    }
}

impl Reader {
    /// A reader of the records after `position`.
    pub(crate) fn new(
        name: String,
        records: Records,
        position: InputPosition,
        skip: bool,
        embedder: Embedder,
        options: EmbedOptions,
    ) -> Self {
        Self { name, records, position, skip, embedder, options: OwnedOptions::new(options) }
    }

    /// Sends chunks until the input ends, an error occurs or the receiver is dropped.
    fn send_chunks(mut self, chunks: &SyncSender<ReadChunk>) {
        loop {
            let mut skipped = vec![];
            let Some(chunk) = self.next_chunk(&mut skipped).transpose() else { return };
            let last = chunk.is_err();
            if chunks.send((skipped, chunk)).is_err() || last {
                return;
            }
        }
    }

    /// The next chunk; `None` at the end of the input. Appends the invalid records that are skipped
    /// to `skipped`.
    fn next_chunk(&mut self, skipped: &mut Vec<InvalidRecord>) -> Result<Option<Chunk>> {
        let (mut records, mut position) = (vec![], self.position);
        for record in self.records.by_ref().take(TEXTS_PER_CHUNK) {
            let after = position.after(&record);
            match record {
                Ok(record) => records.push(record),
                Err(invalid) if self.skip && !invalid.is_fatal() => skipped.push(invalid),
                Err(invalid) => return Err(invalid.into()),
            }
            position = after;
        }
        if position == self.position {
            return Ok(None);
        }
        self.position = position;
        let texts: Vec<&str> = records.iter().map(Record::text).collect();
        let tokenized = self.embedder.tokenize(&texts, self.options.options());
        let tokenized = tokenized.map_err(|error| Error::of_texts(error, &records, &self.name))?;
        Ok(Some(Chunk { records, tokenized, position }))
    }
}

/// Reads, embeds and writes all chunks, until another thread sets `stop`.
///
/// Calls `on_chunk(skipped, chunk)` for each chunk, except one that cannot be embedded. `skipped`
/// are the invalid records that were skipped. `chunk` is a pair of the number of records read so
/// far and the truncated texts of the chunk, or `None` if the chunk cannot be read or tokenized.
///
/// # Errors
/// - [`Error::InvalidRecord`] for a record that is not skipped, or a long text that is refused
/// - [`Error::Encoder`] if a chunk cannot be tokenized or embedded, or if `stop` is set
/// - those of [`PartialOutput::push`] and [`PartialOutput::save`]
///
/// The vectors of the chunks before the error are saved.
pub(crate) fn embed_chunks(
    reader: Reader,
    output: PartialOutput,
    embedder: &Embedder,
    stop: &AtomicBool,
    mut on_chunk: impl FnMut(&[InvalidRecord], Option<(u64, &[Truncated])>),
) -> Result<PartialOutput> {
    let (send, chunks) = sync_channel(1);
    // Not a scoped thread: the scope would join it, but after an error the reader may still be
    // waiting for input.
    let reader = thread::spawn(move || reader.send_chunks(&send));
    let (result, mut output) = thread::scope(|scope| {
        let (send, vectors) = sync_channel(1);
        let writer = scope.spawn(move || write_chunks(output, &vectors));
        let mut embed = || -> Result<()> {
            for (skipped, chunk) in &chunks {
                let chunk: Chunk = chunk.inspect_err(|_| on_chunk(&skipped, None))?;
                let vectors = embedder.embed_tokenized(&chunk.tokenized, unless_stopped(stop))?;
                on_chunk(&skipped, Some((chunk.position.read, chunk.tokenized.truncated())));
                let vectors = to_vec(&vectors)?;
                if send.send((chunk, vectors)).is_err() {
                    break; // the writer has failed and returns its error
                }
            }
            Ok(())
        };
        let embedded = embed();
        drop(send);
        let (written, output) = writer.join().unwrap_or_else(|panic| resume_unwind(panic));
        (written.and(embedded), output)
    });
    if let Err(error) = result {
        let _ = output.save(); // the first error matters more; an earlier state is still valid
        return Err(error);
    }
    reader.join().unwrap_or_else(|panic| resume_unwind(panic));
    Ok(output)
}

/// Writes chunks until the sender is dropped or an error occurs.
fn write_chunks(
    mut output: PartialOutput,
    chunks: &Receiver<(Chunk, Vec<f32>)>,
) -> (Result<()>, PartialOutput) {
    let written = chunks.iter().try_for_each(|(chunk, vectors)| {
        output.push(&chunk.records, &vectors, chunk.position)?;
        output.save_periodically()
    });
    (written, output)
}

/// The values of a tensor in row-major order.
///
/// # Errors
/// [`Error::Encoder`] if the values cannot be copied from the device.
pub(crate) fn to_vec(tensor: &candle_core::Tensor) -> Result<Vec<f32>> {
    let values = tensor.flatten_all().and_then(|values| values.to_vec1());
    Ok(values.map_err(encoder::Error::from)?)
}
