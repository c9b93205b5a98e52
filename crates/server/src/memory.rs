//! The memory of requests. Before a request uses memory for its tokens and values, it waits until
//! the memory of all requests together is at most
//! [`Limits::max_memory`](crate::Limits::max_memory).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::{Failure, Kind};

/// Number of bytes of one permit.
const UNIT: usize = 1 << 10;

/// The memory of requests, in parts. What they leave is for the computation: the activations of a
/// batch, the tokenizers, and parts of responses.
pub struct Memory {
    /// For small requests, so that large ones do not delay them.
    small: Lane,
    large: Lane,
    /// For tokenizers whose texts cannot be split. A request with memory of another lane may wait
    /// for this one, but not the other way round, so that none waits forever.
    tokenizers: Lane,
    /// Bytes of the bodies of all requests, and of the texts in them.
    body_bytes: Arc<AtomicUsize>,
    max_body_bytes: usize,
}

/// Requests that wait for memory in the order in which they came.
struct Lane {
    permits: Arc<Semaphore>,
    bytes: usize,
}

/// Memory of a request. Dropping the value releases it.
pub struct MemoryReservation {
    _permit: OwnedSemaphorePermit,
    /// The memory of the body and of the texts in it, which the response may contain.
    _body: Option<BodyReservation>,
}

impl MemoryReservation {
    /// This memory together with that of the body.
    pub fn with_body(self, body: BodyReservation) -> Self {
        Self { _body: Some(body), ..self }
    }
}

/// Memory of a body. Dropping the value releases it.
pub struct BodyReservation {
    all: Arc<AtomicUsize>,
    own: usize,
    max: usize,
}

impl BodyReservation {
    /// Reserves more bytes. Returns whether all requests together stay within the limit, or this
    /// reservation is the only one.
    pub fn add(&mut self, bytes: usize) -> bool {
        self.own += bytes;
        let all = self.all.fetch_add(bytes, Ordering::Relaxed) + bytes;
        all <= self.max || all == self.own
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.all.fetch_sub(self.own, Ordering::Relaxed);
    }
}

impl Memory {
    /// Divides `max` bytes.
    pub fn new(max: usize) -> Self {
        let lane = |bytes: usize| {
            let permits = (bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
            Lane { permits: Arc::new(Semaphore::new(permits)), bytes: permits * UNIT }
        };
        Self {
            small: lane(max / 10),
            large: lane(max / 5 * 2),
            tokenizers: lane(max / 5),
            body_bytes: Arc::default(),
            max_body_bytes: max / 5,
        }
    }

    /// Waits for `bytes` bytes. `field` is the field of the request with the texts.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if a request may not reserve as much.
    pub async fn reserve(&self, bytes: usize, field: &str) -> Result<MemoryReservation, Failure> {
        let lane = if bytes <= self.small.bytes / 16 { &self.small } else { &self.large };
        lane.reserve(bytes).await.map_err(|failure| failure.with_default_field(field))
    }

    /// Waits for `bytes` bytes of a tokenizer.
    ///
    /// # Errors
    /// [`Kind::TooLarge`] if a tokenizer may not reserve as much.
    pub async fn reserve_for_tokenizer(&self, bytes: usize) -> Result<MemoryReservation, Failure> {
        self.tokenizers.reserve(bytes).await
    }

    /// A reservation for one body, at first of 0 bytes.
    pub fn body_reservation(&self) -> BodyReservation {
        BodyReservation { all: self.body_bytes.clone(), own: 0, max: self.max_body_bytes }
    }
}

impl Lane {
    async fn reserve(&self, bytes: usize) -> Result<MemoryReservation, Failure> {
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
        let acquired = self.permits.clone().acquire_many_owned(permits).await;
        let permit = acquired.map_err(|_| Failure::unavailable("the server is shutting down"))?;
        Ok(MemoryReservation { _permit: permit, _body: None })
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, pin::pin, task::Poll};

    use super::*;

    const MIB: usize = 1 << 20;

    #[tokio::test]
    async fn a_request_waits_until_others_release_their_memory() {
        let memory = Memory::new(100 * MIB); // 40 MiB for large requests
        let refused = memory.reserve(41 * MIB, "inputs").await.err().unwrap();
        assert_eq!(refused.kind(), Kind::TooLarge);
        assert!(refused.message().contains("about 41 MiB of memory: expected at most 40 MiB"));
        let first = memory.reserve(30 * MIB, "inputs").await.unwrap();
        let mut second = pin!(memory.reserve(11 * MIB, "inputs"));
        let is_ready = poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_ready()));
        assert!(!is_ready.await);
        // Neither small requests nor tokenizers wait for large requests.
        memory.reserve(MIB / 2, "inputs").await.unwrap();
        memory.reserve_for_tokenizer(20 * MIB).await.unwrap();
        drop(first);
        second.await.unwrap();
    }

    #[test]
    fn the_bytes_of_all_bodies_are_limited_and_released() {
        let memory = Memory::new(50); // 10 bytes for bodies
        let mut first = memory.body_reservation();
        assert!(first.add(7));
        let mut second = memory.body_reservation();
        assert!(!second.add(4));
        drop(second);
        assert!(first.add(3));
        assert!(first.add(90), "the only reservation is never refused");
        drop(first);
        assert_eq!(memory.body_bytes.load(Ordering::Relaxed), 0);
    }
}
