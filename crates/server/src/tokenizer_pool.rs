//! Tokenizes the texts of requests: small texts on the calling thread, others in turn on a bounded
//! number of threads.

use std::{ops::Range, sync::Arc, time::Instant};

use encoder::TextTokenizer;
use ops::max_threads;
use tokio::sync::Semaphore;

use crate::{
    failure::{Failure, Kind},
    memory::Memory,
    metrics::{Metrics, Stage},
};

/// Texts of at most this many bytes are tokenized on the calling thread, since this takes less time
/// than waking another.
const INLINE_BYTES: usize = 4096;

/// Maximum size of a text, in bytes.
const MAX_TEXT_BYTES: usize = 1 << 20;
/// Texts are tokenized in groups of at most this many bytes, or one text.
const CHUNK_BYTES: usize = 256 << 10;
/// A text whose tokenization needs more bytes, since it cannot be split, waits for memory.
const TOKENIZER_MEMORY: usize = 8 << 20;

/// The threads that tokenize. Requests take turns in the order of their calls.
pub struct TokenizerPool {
    permits: Arc<Semaphore>,
    memory: Arc<Memory>,
    metrics: Arc<Metrics>,
}

impl TokenizerPool {
    pub fn new(threads: usize, memory: Arc<Memory>, metrics: Arc<Metrics>) -> Self {
        Self { permits: Arc::new(Semaphore::new(threads)), memory, metrics }
    }

    /// Tokenizes texts in groups of at most [`CHUNK_BYTES`], or one text, each with `extra_bytes`
    /// more bytes, such as those of a prompt. `name_of` returns the name of a text in errors. Each
    /// group takes a permit of its own, so that requests of few texts need not wait for all groups
    /// of larger requests. If the future is dropped, the groups that have not begun are not
    /// tokenized.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] for a text of more than [`MAX_TEXT_BYTES`], and for one whose
    /// tokenization needs too much memory; the errors of `tokenize`; [`Kind::Internal`] if it
    /// panics on another thread.
    pub async fn tokenize<I: Text, T: Send + 'static>(
        &self,
        tokenizer: &TextTokenizer,
        texts: Arc<Vec<I>>,
        extra_bytes: usize,
        name_of: impl Fn(usize) -> String,
        tokenize: impl Fn(&[I]) -> Result<Vec<T>, Failure> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        let groups = groups(&texts, extra_bytes, &name_of)?;
        let start = Instant::now();
        let bytes: usize = texts.iter().map(|text| text.bytes() + extra_bytes).sum();
        let result = if bytes <= INLINE_BYTES {
            tokenize(&texts)
        } else {
            let tokenize = Arc::new(tokenize);
            self.tokenize_groups(tokenizer, texts, groups, name_of, tokenize).await
        };
        self.metrics.stage(Stage::Tokenize).observe(start.elapsed().as_secs_f64());
        result
    }

    /// Calls `f` on another thread, in turn with the tokenization of other requests.
    ///
    /// # Errors
    /// [`Kind::Internal`] if `f` panics.
    pub async fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        // The semaphore gives its permits in the order of the calls.
        let permit = self.permits.clone().acquire_owned().await;
        // The task keeps its permit until it ends, even if this future is dropped.
        let task = tokio::task::spawn_blocking(move || {
            let result = f();
            drop(permit);
            result
        });
        task.await.map_err(|_| {
            let message = "the tokenizer panicked: this is a defect of the server";
            Failure::new(Kind::Internal, message)
        })
    }

    async fn tokenize_groups<I: Text, T: Send + 'static>(
        &self,
        tokenizer: &TextTokenizer,
        texts: Arc<Vec<I>>,
        groups: Vec<Range<usize>>,
        name_of: impl Fn(usize) -> String,
        tokenize: Arc<impl Fn(&[I]) -> Result<Vec<T>, Failure> + Send + Sync + 'static>,
    ) -> Result<Vec<T>, Failure> {
        let mut all = Vec::with_capacity(texts.len());
        for group in groups {
            let parts = texts[group.clone()].iter().flat_map(Text::parts);
            let largest = parts.map(|part| tokenizer.tokenization_memory(part)).max();
            // The texts of a group are tokenized on several threads.
            let memory = largest.unwrap_or(0) * group.len().min(max_threads());
            let reservation = if memory > TOKENIZER_MEMORY {
                let reserved = self.memory.reserve_for_tokenizer(memory).await;
                Some(reserved.map_err(|failure| failure.with_name(&name_of(group.start)))?)
            } else {
                None
            };
            let texts = texts.clone();
            let tokenize = tokenize.clone();
            let tokenize_group = move || {
                let _reservation = reservation; // also if the future is dropped
                tokenize(&texts[group])
            };
            all.extend(self.run(tokenize_group).await??);
        }
        Ok(all)
    }
}

/// Splits texts into groups of at most [`CHUNK_BYTES`], or one text, since a tokenizer needs many
/// times the memory of its texts.
///
/// # Errors
/// [`Kind::TooLarge`] for a text of more than [`MAX_TEXT_BYTES`].
fn groups<I: Text>(
    texts: &[I],
    extra_bytes: usize,
    name_of: &impl Fn(usize) -> String,
) -> Result<Vec<Range<usize>>, Failure> {
    let mut groups = vec![];
    let mut start = 0;
    let mut bytes = 0;
    for (index, text) in texts.iter().enumerate() {
        let got = text.bytes() + extra_bytes;
        if got > MAX_TEXT_BYTES {
            let name = name_of(index);
            let message = format!("{name} has {got} bytes: expected at most {MAX_TEXT_BYTES}");
            return Err(Failure::new(Kind::TooLarge, message));
        }
        if index > start && bytes + got > CHUNK_BYTES {
            groups.push(start..index);
            start = index;
            bytes = 0;
        }
        bytes += got;
    }
    groups.push(start..texts.len());
    Ok(groups)
}

/// A text, or a pair of texts, or what is decoded to a text.
pub trait Text: Send + Sync + 'static {
    /// The texts that are tokenized.
    fn parts(&self) -> impl Iterator<Item = &str>;

    /// The number of bytes of the texts, or of token ids.
    fn bytes(&self) -> usize {
        self.parts().map(str::len).sum()
    }
}

impl Text for String {
    fn parts(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.as_str())
    }
}

/// A text with its index in the request.
impl Text for (usize, String) {
    fn parts(&self) -> impl Iterator<Item = &str> {
        self.1.parts()
    }
}

/// A text, and the second text of a pair.
impl Text for (String, Option<String>) {
    fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.parts().chain(self.1.as_deref())
    }
}

/// The token ids of a text.
impl Text for Vec<u32> {
    fn parts(&self) -> impl Iterator<Item = &str> {
        std::iter::empty()
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    };

    use encoder::{ModelConfig, ModelFiles};

    use super::*;

    /// Texts of four groups.
    fn large() -> Arc<Vec<String>> {
        Arc::new(vec!["x ".repeat(CHUNK_BYTES / 2); 4])
    }

    fn tokenizer() -> TextTokenizer {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../weights/all-MiniLM-L6-v2");
        let files = ModelFiles::dir(dir).unwrap();
        let config = files.need("config.json", "sizes").unwrap();
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        TextTokenizer::from_files(&files, &config).unwrap()
    }

    fn pool_of_one_thread() -> TokenizerPool {
        TokenizerPool::new(1, Arc::new(Memory::new(200 << 20)), Arc::default())
    }

    fn text_name(index: usize) -> String {
        format!("text {index}")
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn groups_have_a_bounded_size() {
        let texts = [200_000, 100_000, 10, 300_000, 5].map(|length| "x".repeat(length));
        assert_eq!(groups(&texts, 0, &text_name).unwrap(), [0..1, 1..3, 3..4, 4..5]);
        let huge = ["x".to_string(), "x".repeat(MAX_TEXT_BYTES + 1)];
        let refused = groups(&huge, 0, &text_name).unwrap_err();
        assert_eq!(refused.kind(), Kind::TooLarge);
        assert!(refused.message().starts_with("text 1 has"), "{}", refused.message());
    }

    #[test]
    fn a_small_request_is_tokenized_between_the_groups_of_a_large_one() {
        let pool = pool_of_one_thread();
        let tokenizer = tokenizer();
        let order = Arc::new(Mutex::new(vec![]));
        let request = |name: &'static str, texts| {
            let order = order.clone();
            pool.tokenize(&tokenizer, texts, 0, text_name, move |texts: &[String]| {
                order.lock().unwrap().push(name);
                Ok(texts.iter().map(String::len).collect())
            })
        };
        let small = Arc::new(vec!["x".repeat(INLINE_BYTES + 1)]);
        let (large, small, ()) = block_on(async {
            let permit = pool.permits.acquire().await;
            // Both requests wait when the permit is returned.
            let release = async { drop(permit) };
            tokio::join!(request("large", large()), request("small", small), release)
        });
        assert_eq!(
            (large.unwrap(), small.unwrap()),
            (vec![CHUNK_BYTES; 4], vec![INLINE_BYTES + 1])
        );
        assert_eq!(*order.lock().unwrap(), ["large", "small", "large", "large", "large"]);
    }

    #[test]
    fn the_remaining_groups_of_an_abandoned_request_are_not_tokenized() {
        let pool = pool_of_one_thread();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let tokenizer = tokenizer();
        let request = pool.tokenize(&tokenizer, large(), 0, text_name, move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(Vec::<()>::new())
        });
        block_on(async {
            let mut request = Box::pin(request);
            let poll = std::future::poll_fn(|context| {
                std::task::Poll::Ready(request.as_mut().poll(context).is_ready())
            });
            assert!(!poll.await);
            drop(request);
            drop(pool.permits.acquire().await); // the group that had begun has ended
        });
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
