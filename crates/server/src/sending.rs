//! Large answers, which are in memory until a client has received them.

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

use crate::{
    Models,
    failure::Failure,
    input::{Held, Reserved},
};

/// An answer of at most this many bytes is sent at once.
const SMALL: u64 = 64 << 10;
/// Size of the parts of a large answer in bytes.
const PART: usize = 64 << 10;
/// A client that receives a large answer at a lower rate, in bytes per second, is disconnected after
/// the time limit of requests.
const MIN_RATE: u64 = 256 << 10;

/// The body of a large answer, in parts. It holds the permit of the request and the bytes of the
/// answer until the last part is sent or the client is disconnected.
struct Sending {
    rest: Bytes,
    deadline: Instant,
    _held: Held,
    _bytes: Reserved,
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
        } else if Instant::now() > self.deadline {
            Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the client reads too slowly")))
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

/// The response with a body that holds `held` until it is sent, if the body is large.
///
/// # Errors
/// [`Kind::Overloaded`](crate::failure::Kind::Overloaded) if the answers that are being sent are too
/// large together.
pub async fn hold(response: Response, held: Held, models: &Models) -> Result<Response, Failure> {
    let Some(size) = response.body().size_hint().exact().filter(|&size| size > SMALL) else {
        return Ok(response);
    };
    let bytes = models.reserve_answer(size as usize)?;
    let (parts, body) = response.into_parts();
    // The body is one part in memory, which is not copied.
    let rest = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let time = models.limits().timeout + Duration::from_secs(size / MIN_RATE);
    let deadline = Instant::now() + time;
    let sending = Sending { rest, deadline, _held: held, _bytes: bytes };
    Ok(Response::from_parts(parts, Body::new(sending)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    #[tokio::test]
    async fn large_answers_are_sent_in_parts_and_counted_until_they_are_sent() {
        let models = Models::new(Limits::default()).unwrap();
        let bytes: Vec<u8> = (0..1_000_000).map(|i| i as u8).collect();
        let held = || Held::default();
        let response = Response::new(Body::from(bytes.clone()));
        let response = hold(response, held(), &models).await.unwrap();
        assert_eq!(response.body().size_hint().exact(), Some(1_000_000));
        // 512 MiB are allowed together.
        assert!(models.reserve_answer(512 << 20).is_err());
        let mut body = response.into_body();
        let mut received = vec![];
        while let Some(frame) = body.frame().await {
            let part = frame.unwrap().into_data().unwrap();
            assert!(part.len() <= PART);
            received.extend_from_slice(&part);
        }
        assert!(received == bytes);
        drop(body);
        assert!(models.reserve_answer(512 << 20).is_ok());
    }

    #[tokio::test]
    async fn a_client_that_reads_too_slowly_gets_an_error() {
        let limits = Limits { timeout: Duration::ZERO, ..Limits::default() };
        let models = Models::new(limits).unwrap();
        let response = Response::new(Body::from(vec![0; 100_000]));
        let response = hold(response, Held::default(), &models).await.unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let frame = response.into_body().frame().await.unwrap();
        assert!(frame.unwrap_err().to_string().contains("reads too slowly"));
    }
}
