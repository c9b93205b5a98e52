//! The models of a server, and what their requests share: the engine, the limits and the metrics.

use std::{
    any::Any,
    fmt,
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use encoder::TextTokenizer;
use ops::max_threads;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    Error, Limits, Model,
    engine::Engine,
    failure::{Failure, Kind},
    memory::{Memory, Reserved, Share},
    metrics::{Metrics, Stage},
    request_model::note_model,
};

/// Texts of at most this many bytes are tokenized on the calling thread, since this takes less time
/// than waking another.
const INLINE_BYTES: usize = 4096;

/// Maximum size of a text, in bytes.
const MAX_TEXT_BYTES: usize = 1 << 20;
/// Maximum size of a query, of a question, and of a text of the tasks of the command `encodle`, in
/// bytes.
pub(crate) const MAX_UNBATCHED_BYTES: usize = 64 << 10;
/// Texts are tokenized in groups of at most this many bytes, or one text.
const CHUNK_BYTES: usize = 256 << 10;
/// A text whose tokenization needs more bytes, since it cannot be split, waits for memory.
const TOKENIZER_MEMORY: usize = 8 << 20;

/// The models of a server, with the thread that computes their requests.
///
/// Clones share the models. While there are no models, `/health` and requests that need a model
/// fail with status 503.
#[derive(Clone)]
pub struct Models(Arc<Inner>);

struct Inner {
    /// `None` until the models are loaded.
    named: RwLock<Option<Arc<Named>>>,
    engine: Engine,
    limits: Limits,
    metrics: Arc<Metrics>,
    in_progress: Arc<Semaphore>,
    tokenizing: Arc<Semaphore>,
    /// Bytes of the bodies of requests in progress, and of the texts in them.
    body_bytes: Arc<AtomicUsize>,
    memory: Memory,
    is_stopping: AtomicBool,
}

/// Models by name. The first is the default.
type Named = Vec<(String, Arc<Model>)>;

/// A model that was found by its name or its task.
pub struct Found<T> {
    pub name: String,
    pub model: Arc<Model>,
    /// The pipeline of the model's task.
    pub pipeline: Arc<T>,
}

/// Prints the limits.
impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Models").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

impl Models {
    /// Starts an engine without models. [`Self::replace`] adds them.
    ///
    /// # Errors
    /// [`Error::Thread`] if the thread cannot be started.
    pub fn new(limits: Limits) -> Result<Self, Error> {
        let metrics = Arc::new(Metrics::default());
        let engine = Engine::start(limits.clone(), metrics.clone()).map_err(Error::Thread)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self(Arc::new(Inner {
            named: RwLock::new(None),
            engine,
            in_progress: Arc::new(Semaphore::new(limits.max_requests.min(Semaphore::MAX_PERMITS))),
            memory: Memory::new(limits.max_memory),
            limits,
            metrics,
            tokenizing: Arc::new(Semaphore::new(threads)),
            body_bytes: Arc::default(),
            is_stopping: AtomicBool::new(false),
        })))
    }

    /// Warms up each model, and then replaces all models by these. The first is the default.
    /// Requests in progress keep the models that they began with.
    ///
    /// # Errors
    /// [`Error::SameName`] for two models of the same name; [`Error::Model`] if a model cannot
    /// compute.
    pub fn replace(&self, models: Vec<(String, Model)>) -> Result<(), Error> {
        for (i, (name, model)) in models.iter().enumerate() {
            if models[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::SameName { name: name.clone() });
            }
            model.warm_up()?;
        }
        let loaded = models.iter().map(|(_, model)| model.created()).max().unwrap_or_default();
        self.0.metrics.loaded.set(loaded as i64);
        let named: Named =
            models.into_iter().map(|(name, model)| (name, Arc::new(model))).collect();
        self.inherit_speeds(&named);
        let numbers = |named: &Named| named.iter().map(|(_, model)| model.number()).collect();
        let replaced: Vec<u64> = self.all().map_or_else(|_| vec![], |all| numbers(&all));
        let names = named.iter().map(|(name, model)| (model.number(), name.clone())).collect();
        self.0.metrics.set_names(names, &replaced);
        let named = (!named.is_empty()).then(|| Arc::new(named));
        *self.0.named.write().unwrap_or_else(PoisonError::into_inner) = named;
        Ok(())
    }

    /// Copies the measured speed of each current model to the new model of the same name, so that
    /// [`Limits::max_wait`] holds from the first request on.
    fn inherit_speeds(&self, new: &Named) {
        let current = self.all().unwrap_or_default();
        let pair = |(name, model): &(String, Arc<Model>)| {
            let (_, old) = current.iter().find(|(known, _)| known == name)?;
            Some((old.number(), model.number()))
        };
        let pairs: Vec<(u64, u64)> = new.iter().filter_map(pair).collect();
        self.0.engine.inherit_speeds(&pairs);
    }

    /// Makes `/health` fail, so that load balancers send no more requests. Other routes still
    /// work, and their responses close the connection.
    pub fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.0.is_stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// All models.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] if they are not loaded.
    pub(crate) fn all(&self) -> Result<Arc<Named>, Failure> {
        let named = self.0.named.read().unwrap_or_else(PoisonError::into_inner);
        named.clone().ok_or_else(|| Failure::unavailable("the models are not loaded yet"))
    }

    /// Whether load balancers should send requests: the models are loaded and the server is not
    /// shutting down.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] before the models are loaded, and after [`Self::stop`].
    pub(crate) fn health(&self) -> Result<(), Failure> {
        if self.is_stopping() {
            return Err(Failure::unavailable("the server is shutting down"));
        }
        self.all().map(drop)
    }

    /// Counts a request among those in progress until the permit is dropped.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if there are [`Limits::max_requests`] requests.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.0.in_progress.clone().try_acquire_owned().map_err(|_| {
            let max = self.0.limits.max_requests;
            self.overloaded(&format!("the server already has {max} requests in progress"))
        })
    }

    /// The failure of a request that is refused before its tokens are known.
    pub(crate) fn overloaded(&self, reason: &str) -> Failure {
        let seconds = self.engine().retry_after();
        Failure::overloaded(format!("{reason}: try again later"), seconds)
    }

    /// Waits for memory for `bytes` bytes of tokens and values. `field` is the field of the request
    /// with the texts.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if a request may not take as much.
    pub(crate) async fn take_memory(&self, bytes: usize, field: &str) -> Result<Share, Failure> {
        self.0.memory.take(bytes, field).await
    }

    /// A reservation for one body, at first of 0 bytes. The bytes that are added to the reservation
    /// count towards the limit on the bodies of all requests together.
    pub(crate) fn body_reservation(&self) -> Reserved {
        Reserved::new(self.0.body_bytes.clone(), self.0.memory.bodies)
    }

    /// The model called `name`, or the default if `name` is `None`.
    ///
    /// # Errors
    /// [`Kind::UnknownModel`] if no model has this name; the error of [`Self::all`].
    pub(crate) fn any(&self, name: Option<&str>) -> Result<(String, Arc<Model>), Failure> {
        let all = self.all()?;
        let found = match name {
            None => all.first(),
            Some(name) => all.iter().find(|(known, _)| known == name),
        };
        found.cloned().inspect(|(name, _)| note_model(name)).ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
            let message = format!(
                "model {:?} is unknown: expected one of {known:?}",
                name.unwrap_or_default()
            );
            Failure::new(Kind::UnknownModel, message).with_field("model")
        })
    }

    /// `name`, or `None` if there is only one model. Clients of OpenAI and Cohere always send a
    /// name; like text-embeddings-inference and llama.cpp, a server with one model ignores it.
    ///
    /// # Errors
    /// The error of [`Self::all`].
    pub(crate) fn unless_single<'a>(
        &self,
        name: Option<&'a str>,
    ) -> Result<Option<&'a str>, Failure> {
        let is_single = self.all()?.len() == 1;
        Ok(name.filter(|_| !is_single))
    }

    /// The model called `name`, or the first model for a task if `name` is `None`. The pipeline of
    /// the task has the type `P`, and fulfils the condition.
    ///
    /// # Errors
    /// [`Kind::Backend`] if the named model has another task, or if `name` is `None` and no model
    /// has the task; the errors of [`Self::any`].
    pub(crate) fn find<P: Any + Send + Sync>(
        &self,
        name: Option<&str>,
        task: &str,
        condition: impl Fn(&P) -> bool,
    ) -> Result<Found<P>, Failure> {
        let found = |(name, model): (String, Arc<Model>)| {
            let pipeline = model.task().pipeline().filter(|pipeline| condition(pipeline))?;
            note_model(&name);
            Some(Found { name, model, pipeline })
        };
        match name {
            None => self.all()?.iter().cloned().find_map(found).ok_or_else(|| {
                Failure::new(
                    Kind::Backend,
                    format!("this server has no model for {task}: GET /info lists its models"),
                )
            }),
            Some(_) => {
                let (name, model) = self.any(name)?;
                let own = model.task_name();
                let message = format!("model {name:?} is for {own}: expected a model for {task}");
                found((name, model))
                    .ok_or_else(|| Failure::new(Kind::Backend, message).with_field("model"))
            }
        }
    }

    /// Tokenizes texts in groups of at most [`CHUNK_BYTES`], or one text, each with `more` bytes,
    /// such as those of a prompt. `name_of` returns the name of a text in errors. Each group takes
    /// a permit of its own, so that requests of few texts need not wait for all groups of larger
    /// requests. If the future is dropped, the groups that have not begun are not tokenized.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] for a text of more than [`MAX_TEXT_BYTES`], and for one whose
    /// tokenization needs too much memory; the errors of `tokenize`; [`Kind::Internal`] if it
    /// panics on another thread.
    pub(crate) async fn tokenize<I: Text, T: Send + 'static>(
        &self,
        tokenizer: &TextTokenizer,
        texts: Arc<Vec<I>>,
        more: usize,
        name_of: impl Fn(usize) -> String,
        tokenize: impl Fn(&[I]) -> Result<Vec<T>, Failure> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        let groups = groups(&texts, more, &name_of)?;
        let start = Instant::now();
        let is_small = texts.iter().map(|text| text.bytes() + more).sum::<usize>() <= INLINE_BYTES;
        let result = if is_small {
            tokenize(&texts)
        } else {
            let tokenize = Arc::new(tokenize);
            self.tokenize_groups(tokenizer, texts, groups, name_of, tokenize).await
        };
        self.0.metrics.stage(Stage::Tokenize).observe(start.elapsed().as_secs_f64());
        result
    }

    /// Calls `f` on another thread, in turn with the tokenization of other requests.
    ///
    /// # Errors
    /// [`Kind::Internal`] if `f` panics.
    pub(crate) async fn on_thread<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        // The semaphore gives its permits in the order of the calls.
        let permit = self.0.tokenizing.clone().acquire_owned().await;
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
            let share = if memory > TOKENIZER_MEMORY {
                let share = self.0.memory.take_for_tokenizer(memory).await;
                Some(share.map_err(|failure| failure.with_name(&name_of(group.start)))?)
            } else {
                None
            };
            let (texts, tokenize) = (texts.clone(), tokenize.clone());
            let tokenize = move || {
                let _share = share; // also if the future is dropped
                tokenize(&texts[group])
            };
            all.extend(self.on_thread(tokenize).await??);
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
    more: usize,
    name_of: &impl Fn(usize) -> String,
) -> Result<Vec<Range<usize>>, Failure> {
    let (mut groups, mut start, mut bytes) = (vec![], 0, 0);
    for (index, text) in texts.iter().enumerate() {
        let got = text.bytes() + more;
        if got > MAX_TEXT_BYTES {
            let name = name_of(index);
            let message = format!("{name} has {got} bytes: expected at most {MAX_TEXT_BYTES}");
            return Err(Failure::new(Kind::TooLarge, message));
        }
        if index > start && bytes + got > CHUNK_BYTES {
            groups.push(start..index);
            (start, bytes) = (index, 0);
        }
        bytes += got;
    }
    groups.push(start..texts.len());
    Ok(groups)
}

/// A text, or a pair of texts, or what is decoded to a text.
pub(crate) trait Text: Send + Sync + 'static {
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

/// The name of a text in errors, for a field that is a list.
pub(crate) fn text_name(index: usize) -> String {
    format!("text {index}")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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

    /// Models whose requests share one permit to tokenize.
    fn with_one_permit() -> Models {
        let models = Models::new(Limits::default()).unwrap();
        models.0.tokenizing.forget_permits(models.0.tokenizing.available_permits() - 1);
        models
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
        let models = with_one_permit();
        let tokenizer = tokenizer();
        let order = Arc::new(Mutex::new(vec![]));
        let request = |name: &'static str, texts| {
            let order = order.clone();
            models.tokenize(&tokenizer, texts, 0, text_name, move |texts: &[String]| {
                order.lock().unwrap().push(name);
                Ok(texts.iter().map(String::len).collect())
            })
        };
        let small = Arc::new(vec!["x".repeat(INLINE_BYTES + 1)]);
        let (large, small, ()) = block_on(async {
            let permit = models.0.tokenizing.acquire().await;
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
        let models = with_one_permit();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let tokenizer = tokenizer();
        let request = models.tokenize(&tokenizer, large(), 0, text_name, move |_| {
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
            drop(models.0.tokenizing.acquire().await); // the group that had begun has ended
        });
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
