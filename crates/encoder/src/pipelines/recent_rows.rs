//! The rows of the texts that were embedded last, for texts that occur again.

use std::collections::HashMap;

use crate::{Batch, Embed, Result, Row, TokenizedTexts};

/// Maximum size in bytes of each of the two parts of the kept rows.
const MAX_BYTES: usize = 64 << 20;

/// Embeds the texts of successive chunks. The row of a text depends on its tokens alone, so that a
/// text with the tokens of an earlier one has a copy of its row. The rows of the texts that occurred
/// last are kept, at most 128 MiB of them.
///
/// All chunks are of one model with the same options.
///
/// # Examples
/// ```
/// use encoder::{Embed, EmbedOptions, Embedder, LoadOptions, RecentRows};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
/// let mut rows = RecentRows::default();
/// for texts in [["It snows.", "I love AI"], ["i love ai", "A man eats."]] {
///     let tokenized = Embed::tokenize(&embedder, &texts, EmbedOptions::default())?;
///     let embedded = rows.embed(&embedder, &tokenized, |batch| batch())?;
///     assert_eq!(embedded, embedder.embed(&texts)?.to_vec2::<f32>()?);
/// }
/// assert_eq!(rows.repeated(), 1); // the tokens are lowercase
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RecentRows<R> {
    /// The rows of the texts that occurred last, by their tokens.
    newer: HashMap<Box<[u32]>, R>,
    /// The size of `newer` in bytes, at most [`MAX_BYTES`].
    bytes: usize,
    /// The last full `newer`, without the rows that were moved to the present one.
    older: HashMap<Box<[u32]>, R>,
    repeated: u64,
}

impl<R> Default for RecentRows<R> {
    fn default() -> Self {
        Self { newer: HashMap::new(), bytes: 0, older: HashMap::new(), repeated: 0 }
    }
}

impl<R: Row> RecentRows<R> {
    /// The number of texts so far whose row was not computed but copied.
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// [`Embed::embed_rows`] that computes each text once.
    ///
    /// # Errors
    /// The errors of [`Embed::embed_rows`].
    pub fn embed(
        &mut self,
        embedder: &impl Embed<Row = R>,
        texts: &TokenizedTexts,
        run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<R>> {
        if !embedder.computes_rows() {
            return embedder.embed_rows(texts, run);
        }
        /// A kept row, or the index of a text among those that are computed.
        enum Source<R> {
            Kept(R),
            Computed(usize),
        }
        let (mut new, mut of_key) = (vec![], HashMap::new());
        let mut source = |text: usize| {
            let key = texts.key(text);
            if let Some(row) = self.get(&key) {
                return Source::Kept(row);
            }
            let next = new.len();
            let index = *of_key.entry(key).or_insert(next);
            if index == next {
                new.push(text);
            }
            Source::Computed(index)
        };
        let sources: Vec<_> = (0..texts.len()).map(&mut source).collect();
        let computed = if new.len() == texts.len() {
            embedder.embed_rows(texts, run)?
        } else if new.is_empty() {
            vec![]
        } else {
            embedder.embed_rows(&texts.select(&new), run)?
        };
        self.repeated += (texts.len() - new.len()) as u64;
        for (key, index) in of_key {
            self.insert(key, computed[index].clone());
        }
        let row = |source| match source {
            Source::Kept(row) => row,
            Source::Computed(index) => computed[index].clone(),
        };
        Ok(sources.into_iter().map(row).collect())
    }

    /// The row of a text, which has now occurred last.
    fn get(&mut self, key: &[u32]) -> Option<R> {
        if let Some(row) = self.newer.get(key) {
            return Some(row.clone());
        }
        let (key, row) = self.older.remove_entry(key)?;
        self.insert(key, row.clone());
        Some(row)
    }

    fn insert(&mut self, key: Box<[u32]>, row: R) {
        /// The size of an entry without its tokens and values, about.
        const ENTRY: usize = 128;
        let bytes = ENTRY + size_of_val(&key[..]) + row.bytes();
        if self.bytes + bytes > MAX_BYTES {
            self.older = std::mem::take(&mut self.newer);
            self.bytes = 0;
        }
        if bytes <= MAX_BYTES {
            self.bytes += bytes;
            self.newer.insert(key, row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_that_occurred_last_are_kept_within_the_limit() {
        let mut rows = RecentRows::default();
        let key = |i: u32| vec![i].into_boxed_slice();
        let width = MAX_BYTES / 4 / 3 - 100; // three rows fill a part
        let insert =
            |rows: &mut RecentRows<Vec<f32>>, i| rows.insert(key(i), vec![i as f32; width]);
        (0..3).for_each(|i| insert(&mut rows, i));
        assert_eq!((rows.newer.len(), rows.older.len()), (3, 0));
        insert(&mut rows, 3);
        assert_eq!((rows.newer.len(), rows.older.len()), (1, 3));
        assert_eq!(rows.get(&key(1)).unwrap()[0], 1.0); // moves to the newer ones
        insert(&mut rows, 4);
        insert(&mut rows, 5);
        let kept = [0, 1, 2, 3, 4, 5].map(|i| rows.get(&key(i)).is_some());
        assert_eq!(kept, [false, true, false, true, true, true]);
        insert(&mut rows, 6);
        rows.insert(key(7), vec![0.0; MAX_BYTES]);
        assert!(rows.get(&key(7)).is_none());
    }
}
