//! The limit on requests in progress, [`Limits::max_requests`](crate::Limits::max_requests).

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{engine::Engine, failure::Failure};

/// Admits requests while there are fewer in progress than allowed.
pub struct Admission {
    permits: Arc<Semaphore>,
    max_requests: usize,
    /// Estimates when a refused request should be sent again.
    engine: Arc<Engine>,
}

impl Admission {
    pub fn new(max_requests: usize, engine: Arc<Engine>) -> Self {
        let permits = Arc::new(Semaphore::new(max_requests.min(Semaphore::MAX_PERMITS)));
        Self { permits, max_requests, engine }
    }

    /// Counts a request among those in progress until the permit is dropped.
    ///
    /// # Errors
    /// [`Kind::Overloaded`](crate::failure::Kind) if there are
    /// [`Limits::max_requests`](crate::Limits::max_requests) requests.
    pub fn admit(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.permits.clone().try_acquire_owned().map_err(|_| {
            let max = self.max_requests;
            self.overload_failure(&format!("the server already has {max} requests in progress"))
        })
    }

    /// The failure of a request that is refused before its tokens are known.
    pub fn overload_failure(&self, reason: &str) -> Failure {
        Failure::overloaded(format!("{reason}: try again later"), self.engine.retry_after())
    }
}

/// The place for the permit of a request. The middleware puts an empty slot into the extensions of
/// the request; the slot is filled when the body has arrived. The middleware keeps the slot until
/// the handler returns, or until a large response is sent.
#[derive(Clone, Debug, Default)]
pub struct PermitSlot(Arc<OnceLock<OwnedSemaphorePermit>>);

impl PermitSlot {
    pub fn fill(&self, permit: OwnedSemaphorePermit) {
        self.0.set(permit).ok(); // a request has one permit
    }
}
