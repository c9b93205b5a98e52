//! The memory of requests. Before a request takes memory for its tokens and values, it waits until
//! the memory of all requests together is at most [`Limits::max_memory`](crate::Limits::max_memory).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::{Failure, Kind};

/// Number of bytes of one permit.
const UNIT: usize = 1 << 10;

/// The shares of the memory of requests. What they leave is for the computation: the activations of
/// a batch, the tokenizers, and parts of responses.
pub struct Memory {
    /// For small requests, so that large ones do not delay them.
    small: Lane,
    large: Lane,
    /// For tokenizers whose texts cannot be split. A request that holds a share of another lane may
    /// wait for this one, but not the other way round, so that none waits forever.
    tokenizers: Lane,
    /// Maximum number of bytes of the bodies, and of the texts in them.
    pub bodies: usize,
}

/// Requests that wait for memory in the order in which they came.
struct Lane {
    permits: Arc<Semaphore>,
    bytes: usize,
}

/// Memory of a request, until this value is dropped.
pub struct Share {
    _permit: OwnedSemaphorePermit,
    /// The memory of the body and of the texts in it, which the response may contain.
    _body: Option<Reserved>,
}

impl Share {
    /// This memory together with that of the body.
    pub fn with_body(self, body: Reserved) -> Self {
        Self { _body: Some(body), ..self }
    }
}

/// A reservation of bytes in memory for a body. Dropping it releases the bytes.
pub struct Reserved {
    all: Arc<AtomicUsize>,
    own: usize,
    max: usize,
}

impl Reserved {
    /// A reservation of 0 bytes. `all` is the number of bytes that all requests have reserved;
    /// `max` is its limit.
    pub fn new(all: Arc<AtomicUsize>, max: usize) -> Self {
        Self { all, own: 0, max }
    }

    /// Reserves more bytes. Returns whether all requests together stay within the limit, or this
    /// reservation is the only one.
    pub fn add(&mut self, bytes: usize) -> bool {
        self.own += bytes;
        let all = self.all.fetch_add(bytes, Ordering::Relaxed) + bytes;
        all <= self.max || all == self.own
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.all.fetch_sub(self.own, Ordering::Relaxed);
    }
}

impl Memory {
    /// The shares of `max` bytes.
    pub fn new(max: usize) -> Self {
        let lane = |bytes: usize| {
            let permits = (bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
            Lane { permits: Arc::new(Semaphore::new(permits)), bytes: permits * UNIT }
        };
        Self {
            small: lane(max / 10),
            large: lane(max / 5 * 2),
            tokenizers: lane(max / 5),
            bodies: max / 5,
        }
    }

    /// Waits for `bytes` bytes. `field` is the field of the request with the texts.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if a request may not take as much.
    pub async fn take(&self, bytes: usize, field: &str) -> Result<Share, Failure> {
        let lane = if bytes <= self.small.bytes / 16 { &self.small } else { &self.large };
        lane.take(bytes).await.map_err(|failure| failure.with_default_field(field))
    }

    /// Waits for `bytes` bytes of a tokenizer.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if a tokenizer may not take as much.
    pub async fn take_for_tokenizer(&self, bytes: usize) -> Result<Share, Failure> {
        self.tokenizers.take(bytes).await
    }
}

impl Lane {
    async fn take(&self, bytes: usize) -> Result<Share, Failure> {
        if bytes > self.bytes {
            let message = format!(
                "the request needs about {} MiB of memory: expected at most {} MiB, a share of \
                 max_memory; send fewer or shorter texts",
                bytes.div_ceil(1 << 20),
                self.bytes >> 20,
            );
            return Err(Failure::new(Kind::TooLarge, message));
        }
        let permits = bytes.div_ceil(UNIT) as u32; // at most those of the lane
        let permit = self.permits.clone().acquire_many_owned(permits).await;
        let permit = permit.map_err(|_| Failure::unavailable("the server is shutting down"))?;
        Ok(Share { _permit: permit, _body: None })
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::pin, task::Poll};

    use super::*;

    const MIB: usize = 1 << 20;

    #[tokio::test]
    async fn a_request_waits_until_others_return_their_memory() {
        let memory = Memory::new(100 * MIB); // 40 MiB for large requests
        let refused = memory.take(41 * MIB, "inputs").await.err().unwrap();
        assert_eq!(refused.kind(), Kind::TooLarge);
        assert!(refused.message().contains("about 41 MiB of memory: expected at most 40 MiB"));
        let first = memory.take(30 * MIB, "inputs").await.unwrap();
        let mut second = pin!(memory.take(11 * MIB, "inputs"));
        let is_ready = poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_ready()));
        assert!(!is_ready.await);
        // Neither small requests nor tokenizers wait for large requests.
        memory.take(MIB / 2, "inputs").await.unwrap();
        memory.take_for_tokenizer(20 * MIB).await.unwrap();
        drop(first);
        second.await.unwrap();
    }

    #[test]
    fn bytes_in_memory_are_limited_and_given_back() {
        let all = Arc::new(AtomicUsize::new(0));
        let mut first = Reserved::new(all.clone(), 10);
        assert!(first.add(7));
        let mut second = Reserved::new(all.clone(), 10);
        assert!(!second.add(4));
        drop(second);
        assert!(first.add(3));
        assert!(first.add(90), "the only reservation is never refused");
        drop(first);
        assert_eq!(all.load(Ordering::Relaxed), 0);
    }
}
