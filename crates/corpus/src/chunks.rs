//! A pipeline that reads, embeds and writes chunks of records.
//!
//! Three threads work on successive chunks: while the writer thread writes chunk i, the calling
//! thread embeds chunk i + 1, and the reader thread reads and tokenizes chunk i + 2.

use std::{
    panic::resume_unwind,
    sync::{
        atomic::AtomicBool,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use encoder::{
    Embed, EmbedOptions, LongTexts, Prompt, RecentRows, TextRole, TokenizedTexts, unless_stopped,
};

use crate::{Error, InvalidRecord, Record, Records, Result, records::InputPosition};

/// [`Embed::texts_per_chunk`] records that are read, embedded and written together, without invalid
/// ones.
pub(crate) struct Chunk {
    pub(crate) records: Vec<Record>,
    pub(crate) tokenized: TokenizedTexts,
    /// The position in the input after these records.
    pub(crate) position: InputPosition,
}

/// The next part of the input.
struct Part {
    /// The invalid records that were skipped.
    skipped: Vec<InvalidRecord>,
    /// `None` if the chunk cannot be read or tokenized.
    chunk: Option<Chunk>,
    /// The error after the records of the chunk, if any.
    outcome: Result<()>,
}

/// Reads and tokenizes chunks.
pub(crate) struct Reader<E> {
    /// The name of the input in messages.
    pub(crate) name: String,
    pub(crate) records: Records,
    pub(crate) position: InputPosition,
    /// Whether invalid records are skipped.
    pub(crate) skip: bool,
    /// Whether the run cannot be resumed. The records before an error are then a chunk, and records
    /// that were skipped are reported even if their chunk cannot be embedded. A run that can be
    /// resumed reads them again, and its chunks must not depend on where it was interrupted.
    pub(crate) is_stream: bool,
    pub(crate) embedder: E,
    pub(crate) options: OwnedOptions,
}

/// [`EmbedOptions`] that own their prompt.
pub(crate) struct OwnedOptions {
    prompt: String,
    /// Creates the [`Prompt`] from [`Self::prompt`].
    to_prompt: for<'a> fn(&'a str) -> Prompt<'a>,
    long_texts: LongTexts,
    role: TextRole,
}

impl OwnedOptions {
    pub(crate) fn new(options: EmbedOptions) -> Self {
        let (prompt, to_prompt): (&str, for<'a> fn(&'a str) -> Prompt<'a>) = match options.prompt {
            Prompt::Default => ("", |_| Prompt::Default),
            Prompt::None => ("", |_| Prompt::None),
            Prompt::Query => ("", |_| Prompt::Query),
            Prompt::Document => ("", |_| Prompt::Document),
            Prompt::Named(name) => (name, |name| Prompt::Named(name)),
            Prompt::Text(text) => (text, |text| Prompt::Text(text)),
        };
        Self {
            prompt: prompt.to_string(),
            to_prompt,
            long_texts: options.long_texts,
            role: options.role,
        }
    }

    fn options(&self) -> EmbedOptions<'_> {
        let prompt = (self.to_prompt)(&self.prompt);
        let options = EmbedOptions::new().with_prompt(prompt).with_role(self.role);
        options.with_long_texts(self.long_texts)
    }
}

impl<E: Embed> Reader<E> {
    /// Sends the parts of the input until it ends, an error occurs or the receiver is dropped.
    fn send_parts(mut self, parts: &SyncSender<Part>) {
        while let Some(part) = self.next_part() {
            let last = part.outcome.is_err();
            if parts.send(part).is_err() || last {
                return;
            }
        }
    }

    /// The next part; `None` at the end of the input.
    fn next_part(&mut self) -> Option<Part> {
        let (mut records, mut position) = (vec![], self.position);
        let (mut skipped, mut outcome) = (vec![], Ok(()));
        for record in self.records.by_ref().take(self.embedder.texts_per_chunk()) {
            let after = position.after(&record);
            match record {
                Ok(record) => records.push(record),
                Err(invalid) if self.skip && !invalid.is_fatal() => skipped.push(invalid),
                Err(invalid) => {
                    outcome = Err(invalid.into());
                    break;
                }
            }
            position = after;
        }
        if outcome.is_ok() && position == self.position {
            return None;
        }
        self.position = position;
        let is_chunk = outcome.is_ok() || self.is_stream;
        let chunk = if is_chunk { self.tokenize(records, &mut outcome) } else { None };
        Some(Part { skipped, chunk, outcome })
    }

    /// Tokenizes the records of a chunk. If the model refuses a long text of a stream, the chunk
    /// has the records before it.
    fn tokenize(&self, mut records: Vec<Record>, outcome: &mut Result<()>) -> Option<Chunk> {
        loop {
            let texts: Vec<&str> = records.iter().map(Record::text).collect();
            let tokenized = match &texts[..] {
                [] => Ok(TokenizedTexts::default()), // without a check of the prompt
                texts => self.embedder.tokenize(texts, self.options.options()),
            };
            match tokenized {
                Ok(tokenized) => {
                    return Some(Chunk { records, tokenized, position: self.position });
                }
                Err(error @ encoder::Error::Input(encoder::InputError::LongText { index, .. })) => {
                    *outcome = Err(records[index].refused(&self.name, error).into());
                    if !self.is_stream {
                        return None;
                    }
                    records.truncate(index);
                }
                Err(error) => {
                    *outcome = Err(error.into());
                    return None;
                }
            }
        }
    }
}

/// Reads, embeds and writes all chunks, until another thread sets `stop`.
///
/// Calls `on_part(skipped, chunk, repeated)` for each part of the input, except one that cannot be
/// embedded if the run can be resumed. `skipped` are the invalid records that were skipped. `chunk`
/// is `None` if the chunk cannot be read or tokenized. `repeated` is the number of texts so far that
/// were not computed, because they had occurred before.
///
/// # Errors
/// - [`Error::InvalidRecord`] for a record that is not skipped, or a long text that is refused
/// - [`Error::Encoder`] if a chunk cannot be tokenized or embedded, or if `stop` is set
/// - those of `write`
///
/// The chunks before the error are written.
pub(crate) fn embed_chunks<E: Embed, X: From<Error> + Send>(
    reader: Reader<E>,
    stop: &AtomicBool,
    mut write: impl FnMut(Chunk, Vec<E::Row>) -> Result<(), X> + Send,
    mut on_part: impl FnMut(&[InvalidRecord], Option<&Chunk>, u64),
) -> Result<(), X> {
    let (embedder, is_stream) = (reader.embedder.clone(), reader.is_stream);
    let (send, parts) = sync_channel(1);
    // Not a scoped thread: the scope would join it, but after an error the reader may still be
    // waiting for input.
    let reader = thread::spawn(move || reader.send_parts(&send));
    thread::scope(|scope| {
        let (send, embedded) = sync_channel(1);
        let writer = scope.spawn(move || {
            embedded.iter().try_for_each(|(chunk, rows): (Chunk, Vec<E::Row>)| write(chunk, rows))
        });
        let mut recent = RecentRows::default();
        let mut embed = || -> Result<()> {
            for Part { skipped, chunk, outcome } in &parts {
                let Some(chunk) = chunk else {
                    on_part(&skipped, None, recent.repeated());
                    return outcome;
                };
                let rows = recent.embed(&embedder, &chunk.tokenized, unless_stopped(stop));
                if rows.is_ok() || is_stream {
                    on_part(&skipped, Some(&chunk), recent.repeated());
                }
                if send.send((chunk, rows?)).is_err() {
                    break; // the writer has failed and returns its error
                }
                outcome?;
            }
            Ok(())
        };
        let outcome = embed();
        drop(send);
        let written = writer.join().unwrap_or_else(|panic| resume_unwind(panic));
        written.and(outcome.map_err(X::from))
    })?;
    reader.join().unwrap_or_else(|panic| resume_unwind(panic));
    Ok(())
}
