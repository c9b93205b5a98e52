//! The limits of a server.

use std::time::Duration;

/// The limits of a server and of its requests.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of open connections of [`serve()`](crate::serve()). While there are as many,
    /// a new client waits until a connection ends or has been idle for a second; idle connections
    /// are closed. The process needs an open file for each connection.
    pub max_connections: usize,
    /// Maximum number of tokens that are computed together. A longer text is a batch of its own.
    pub max_batch_tokens: usize,
    /// How long a batch that is not full waits for more requests.
    pub batch_delay: Duration,
    /// Maximum number of requests that wait or are computed, or whose response of more than 64 KiB
    /// is being sent. Further requests fail with status 429. A request counts after its body has
    /// arrived.
    pub max_requests: usize,
    /// Maximum memory of the requests in progress, in bytes, besides that of the loaded models. A
    /// request that needs more than two fifths of it is refused; a request for which there is not
    /// enough left waits. The default is the size in docs/deployment.md.
    pub max_memory: usize,
    /// A request fails with status 429 if its estimated wait in the queue is longer than this. The
    /// estimate covers the queued texts of other requests that will be computed before the last
    /// text of this request, at each model's measured speed. The batch that is being computed does
    /// not count.
    pub max_wait: Duration,
    /// Maximum number of texts of a request; at most [`Self::MAX_TEXTS`].
    pub max_texts: usize,
    /// Maximum size of the body of a request, in bytes.
    pub max_body: usize,
    /// Maximum time from the header of a request to its response.
    pub timeout: Duration,
    /// Whether `/v1/embeddings` truncates texts that are longer than the model's maximum length.
    /// Otherwise it refuses them.
    pub auto_truncate: bool,
    /// Whether bodies of requests, and messages of errors that may contain texts, are logged.
    pub log_texts: bool,
}

impl Limits {
    /// The largest value of `max_texts`. The JSON parser accepts lists of at most twice as many
    /// elements.
    pub const MAX_TEXTS: usize = 1 << 20;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 960, // below the usual limit of 1,024 open files
            max_batch_tokens: 512,
            batch_delay: Duration::ZERO,
            max_requests: 512,
            max_memory: 200 << 20,
            max_wait: Duration::from_secs(60),
            max_texts: 2048,
            max_body: 16 << 20,
            timeout: Duration::from_secs(60),
            auto_truncate: false,
            log_texts: false,
        }
    }
}
