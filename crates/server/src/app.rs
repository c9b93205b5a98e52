//! The parts of a server, which are the state that axum passes to the handlers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::available_parallelism,
};

use crate::{
    Error, Limits, admission::Admission, engine::Engine, failure::Failure, memory::Memory,
    metrics::Metrics, registry::Registry, tokenizer_pool::TokenizerPool,
};

/// The parts of a server, in the order in which a request uses them.
pub struct App {
    pub limits: Limits,
    pub admission: Admission,
    pub registry: Registry,
    pub memory: Arc<Memory>,
    pub tokenizer_pool: TokenizerPool,
    pub engine: Arc<Engine>,
    pub metrics: Arc<Metrics>,
    is_stopping: AtomicBool,
}

impl App {
    /// Starts an engine without models.
    ///
    /// # Errors
    /// [`Error::Thread`] if the engine's thread cannot be started.
    pub fn start(limits: Limits) -> Result<Self, Error> {
        let metrics = Arc::new(Metrics::default());
        let engine = Engine::start(limits.clone(), metrics.clone()).map_err(Error::Thread)?;
        let engine = Arc::new(engine);
        let memory = Arc::new(Memory::new(limits.max_memory));
        let threads = available_parallelism().map_or(1, usize::from);
        Ok(Self {
            admission: Admission::new(limits.max_requests, engine.clone()),
            registry: Registry::default(),
            tokenizer_pool: TokenizerPool::new(threads, memory.clone(), metrics.clone()),
            limits,
            memory,
            engine,
            metrics,
            is_stopping: AtomicBool::new(false),
        })
    }

    /// Makes [`Self::health`] fail. Responses close their connections from now on.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Whether load balancers should send requests: the models are loaded and the server is not
    /// shutting down.
    ///
    /// # Errors
    /// [`Kind::Unavailable`](crate::failure::Kind) before the models are loaded, and after
    /// [`Self::stop`].
    pub fn health(&self) -> Result<(), Failure> {
        if self.is_stopping() {
            return Err(Failure::unavailable("the server is shutting down"));
        }
        self.registry.all().map(drop)
    }
}
