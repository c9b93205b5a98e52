//! Large responses, which are in memory until a client has received them.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    response::Response,
};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tracing::Span;

use crate::{
    Models,
    failure::Failure,
    input::{Held, Reserved},
};

/// A response of at most this many bytes is sent whole, and a larger response in parts.
const SMALL: u64 = 64 << 10;
/// Size of the parts of a large response in bytes.
const PART: usize = 64 << 10;
/// A large response must be sent within the time limit of requests plus one second per
/// `BYTES_PER_SECOND` bytes.
const BYTES_PER_SECOND: u64 = 256 << 10;

/// The body of a large response, in parts.
struct Sending {
    /// The parts that are not sent. Each part is a slice of one [`LargeResponse`].
    rest: Bytes,
    /// `None` if the time limit is too large for an [`Instant`].
    deadline: Option<Instant>,
    /// The span of the request, for the log.
    span: Span,
}

/// The bytes of a large response, with the permit of its request and the reservation of the bytes.
/// The permit and the reservation are dropped when the last slice of the bytes is sent, or when the
/// connection ends.
struct LargeResponse {
    bytes: Bytes,
    _held: Held,
    _reserved: Reserved,
}

impl AsRef<[u8]> for LargeResponse {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for Sending {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Ready(if self.rest.is_empty() {
            None
        } else if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
            let reason = "the client reads the response too slowly";
            self.span.in_scope(|| tracing::warn!(reason, "disconnected"));
            Some(Err(io::Error::new(io::ErrorKind::TimedOut, reason)))
        } else {
            let size = self.rest.len().min(PART);
            Some(Ok(Frame::data(self.rest.split_to(size))))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// Returns the response. If its body is large, the new body keeps `held` until the response is
/// sent. `span` is the span of the request.
///
/// # Errors
/// [`Kind::Overloaded`](crate::failure::Kind::Overloaded) if the responses that are being sent are
/// too large together.
pub async fn hold(
    response: Response,
    held: Held,
    models: &Models,
    span: &Span,
) -> Result<Response, Failure> {
    let Some(size) = response.body().size_hint().exact().filter(|&size| size > SMALL) else {
        return Ok(response);
    };
    let reserved = models.reserve_response(size as usize)?;
    let (parts, body) = response.into_parts();
    // The body is a single frame, so `to_bytes` does not copy it.
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let rest = Bytes::from_owner(LargeResponse { bytes, _held: held, _reserved: reserved });
    let time = models.limits().timeout.saturating_add(Duration::from_secs(size / BYTES_PER_SECOND));
    let deadline = Instant::now().checked_add(time);
    let sending = Sending { rest, deadline, span: span.clone() };
    Ok(Response::from_parts(parts, Body::new(sending)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    #[tokio::test]
    async fn large_responses_are_sent_in_parts_and_counted_until_they_are_sent() {
        let models = Models::new(Limits { max_requests: 1, ..Limits::default() }).unwrap();
        let bytes: Vec<u8> = (0..1_000_000).map(|i| i as u8).collect();
        let response = Response::new(Body::from(bytes.clone()));
        let held = Held::default();
        held.set(models.enter().unwrap());
        let response = hold(response, held, &models, &Span::none()).await.unwrap();
        assert_eq!(response.body().size_hint().exact(), Some(1_000_000));
        // Large responses may have 512 MiB together. Small ones are neither counted nor refused.
        assert!(models.reserve_response(512 << 20).is_err());
        assert!(models.enter().is_err());
        let small = Response::new(Body::from(vec![0; 1 << 16]));
        assert!(hold(small, Held::default(), &models, &Span::none()).await.is_ok());
        let mut body = response.into_body();
        let mut received = vec![];
        let mut last = Bytes::new();
        while let Some(frame) = body.frame().await {
            last = frame.unwrap().into_data().unwrap();
            assert!(last.len() <= PART);
            received.extend_from_slice(&last);
        }
        assert!(received == bytes);
        drop(body);
        assert!(models.enter().is_err(), "the last part is not sent");
        drop(last);
        assert!(models.enter().is_ok());
        assert!(models.reserve_response(512 << 20).is_ok());
    }

    #[tokio::test]
    async fn a_client_that_reads_too_slowly_gets_an_error() {
        let limits = Limits { timeout: Duration::ZERO, ..Limits::default() };
        let models = Models::new(limits).unwrap();
        let response = Response::new(Body::from(vec![0; 100_000]));
        let response = hold(response, Held::default(), &models, &Span::none()).await.unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let frame = response.into_body().frame().await.unwrap();
        assert!(frame.unwrap_err().to_string().contains("too slowly"));
    }
}
