//! Responses of more than one part: JSON lists, of which each part is written when the one before
//! it is sent, and the time limit for sending.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;
use tracing::Span;

use crate::{
    admission::PermitSlot,
    failure::{Failure, Kind},
    memory::MemoryReservation,
};

/// Size of the parts of a response in bytes. A response of at most one part is sent whole.
const PART: usize = 64 << 10;
/// After the time limit of requests, a response must have been sent at this speed on average.
const BYTES_PER_SECOND: u64 = 256 << 10;

/// The body of a response that is sent in parts.
struct BodyInParts {
    body: Body,
    /// The bytes of `body` that are not sent yet.
    rest: Bytes,
    /// Number of bytes that are sent.
    sent: u64,
    start: Instant,
    /// The time limit of requests.
    timeout: Duration,
    permit: PermitSlot,
    /// The span of the request, for the log.
    span: Span,
}

/// A part of a response, with the permit of its request, which is returned when the last part is
/// sent or the connection ends.
struct Part {
    bytes: Bytes,
    _permit: PermitSlot,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl BodyInParts {
    fn is_too_slow(&self) -> bool {
        let seconds = Duration::from_secs(self.sent / BYTES_PER_SECOND);
        self.start.elapsed() > self.timeout.saturating_add(seconds)
    }
}

impl HttpBody for BodyInParts {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.is_too_slow() {
            let reason = "the client reads the response too slowly";
            self.span.in_scope(|| tracing::warn!(reason, "disconnected"));
            let error = io::Error::new(io::ErrorKind::TimedOut, reason);
            return Poll::Ready(Some(Err(axum::Error::new(error))));
        }
        while self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                None => return Poll::Ready(None),
                Some(frame) => self.rest = frame?.into_data().unwrap_or_default(),
            }
        }
        let size = self.rest.len().min(PART);
        let part = Part { bytes: self.rest.split_to(size), _permit: self.permit.clone() };
        self.sent += size as u64;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(part)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.body.size_hint().exact() {
            Some(size) => SizeHint::with_exact(size + self.rest.len() as u64),
            None => SizeHint::new(),
        }
    }
}

/// Returns the response. If its body has more than one part, the new body keeps `permit` until the
/// response is sent. `timeout` is the time limit of requests, `span` the span of the request.
pub fn in_parts(
    response: Response,
    permit: PermitSlot,
    timeout: Duration,
    span: &Span,
) -> Response {
    if response.body().size_hint().exact().is_some_and(|size| size <= PART as u64) {
        return response;
    }
    response.map(|body| {
        Body::new(BodyInParts {
            body,
            rest: Bytes::new(),
            sent: 0,
            start: Instant::now(),
            timeout,
            permit,
            span: span.clone(),
        })
    })
}

/// A JSON array, within other JSON, of which each element is computed and written when it is sent.
struct JsonList {
    /// The JSON that is not sent yet.
    out: Vec<u8>,
    /// The elements and their memory; `None` after the last element.
    elements: Option<(Elements, MemoryReservation)>,
    is_first: bool,
    /// The JSON after the array.
    after: Vec<u8>,
}

/// The JSON of each element.
pub type Elements = Box<dyn Iterator<Item = serde_json::Result<Vec<u8>>> + Send>;

impl JsonList {
    /// Writes elements until there is a part.
    fn write(&mut self) -> serde_json::Result<()> {
        while self.out.len() < PART
            && let Some((elements, _)) = &mut self.elements
        {
            match elements.next() {
                Some(element) => {
                    if !std::mem::take(&mut self.is_first) {
                        self.out.push(b',');
                    }
                    self.out.append(&mut element?);
                }
                None => {
                    self.elements = None; // returns its memory
                    self.out.push(b']');
                    self.out.append(&mut self.after);
                }
            }
        }
        Ok(())
    }

    /// The response with status 200. If the array takes more than one part, its elements are taken
    /// while it is sent.
    fn into_response(mut self) -> Response {
        let body = match self.write() {
            Ok(()) if self.elements.is_none() => Body::from(self.out),
            Ok(()) => Body::new(self),
            Err(error) => return Failure::new(Kind::Internal, error).into_response(),
        };
        let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        ([json], body).into_response()
    }
}

impl HttpBody for JsonList {
    type Data = Bytes;
    type Error = serde_json::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<serde_json::Result<Frame<Bytes>>>> {
        self.write()?;
        let part = std::mem::take(&mut self.out);
        Poll::Ready((!part.is_empty()).then(|| Ok(Frame::data(part.into()))))
    }
}

/// The elements of an array.
pub fn elements<T: Serialize>(items: impl Iterator<Item = T> + Send + 'static) -> Elements {
    Box::new(items.map(|item| serde_json::to_vec(&item)))
}

/// The elements of an array of arrays.
pub fn nested_elements<T: Serialize + Send, L: Iterator<Item = T> + Send + 'static>(
    lists: impl Iterator<Item = L> + Send + 'static,
) -> Elements {
    // The brackets of an inner array belong to its first and its last element.
    Box::new(lists.flat_map(|list| {
        let mut list = list.peekable();
        let mut is_first = true;
        std::iter::from_fn(move || {
            let mut out = if std::mem::take(&mut is_first) { b"[".to_vec() } else { vec![] };
            let item = list.next();
            if item.is_none() && out.is_empty() {
                return None;
            }
            let written = item.map_or(Ok(()), |item| serde_json::to_writer(&mut out, &item));
            if list.peek().is_none() {
                out.push(b']');
            }
            Some(written.map(|()| out))
        })
    }))
}

/// A response that is an array. The elements are taken one by one while the response is sent;
/// `elements` and `memory` are dropped after the last.
pub fn json_list(elements: Elements, memory: MemoryReservation) -> Response {
    JsonList {
        out: b"[".to_vec(),
        elements: Some((elements, memory)),
        is_first: true,
        after: vec![],
    }
    .into_response()
}

/// [`json_list`] for an array that is the field `field` of `object`, where it is empty.
pub fn json_object(
    object: &impl Serialize,
    field: &str,
    elements: Elements,
    memory: MemoryReservation,
) -> Response {
    let list = format!("\"{field}\":[");
    let json = serde_json::to_string(object).unwrap_or_default();
    let Some((before, after)) = json.split_once(&format!("{list}]")) else {
        let message = format!("the response has no empty list {field}");
        return Failure::new(Kind::Internal, message).into_response();
    };
    JsonList {
        out: format!("{before}{list}").into_bytes(),
        elements: Some((elements, memory)),
        is_first: true,
        after: after.into(),
    }
    .into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use http_body_util::BodyExt;

    use super::*;
    use crate::{Limits, admission::Admission, engine::Engine, memory::Memory};

    #[tokio::test]
    async fn large_responses_are_sent_in_parts_and_counted_until_they_are_sent() {
        let engine = Engine::start(Limits::default(), Arc::default()).unwrap();
        let admission = Admission::new(1, Arc::new(engine));
        let bytes: Vec<u8> = (0..1_000_000).map(|i| i as u8).collect();
        let response = Response::new(Body::from(bytes.clone()));
        let permit = PermitSlot::default();
        permit.fill(admission.admit().unwrap());
        let response = in_parts(response, permit, Duration::MAX, &Span::none());
        assert_eq!(response.body().size_hint().exact(), Some(1_000_000));
        assert!(admission.admit().is_err());
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
        assert!(admission.admit().is_err(), "the last part is not sent");
        drop(last);
        assert!(admission.admit().is_ok());
    }

    #[tokio::test]
    async fn a_client_that_reads_too_slowly_gets_an_error() {
        let response = Response::new(Body::from(vec![0; 100_000]));
        let response = in_parts(response, PermitSlot::default(), Duration::ZERO, &Span::none());
        std::thread::sleep(Duration::from_millis(2));
        let frame = response.into_body().frame().await.unwrap();
        assert!(frame.unwrap_err().to_string().contains("too slowly"));
    }

    #[tokio::test]
    async fn a_long_list_is_written_while_it_is_sent() {
        let taken = Arc::new(AtomicUsize::new(0));
        let count = taken.clone();
        let items = (0..100_000).inspect(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let memory = Memory::new(1 << 20);
        let reservation = memory.reserve(0, "").await.unwrap();
        let object = serde_json::json!({"data": [], "n": 1});
        let response = json_object(&object, "data", elements(items), reservation);
        assert_eq!(response.body().size_hint().exact(), None);
        let mut body = response.into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!((PART..PART + 10).contains(&first.len()));
        assert!(taken.load(Ordering::Relaxed) < 20_000);
        let rest = body.collect().await.unwrap().to_bytes();
        let json: serde_json::Value = serde_json::from_slice(&[first, rest].concat()).unwrap();
        let expected: Vec<usize> = (0..100_000).collect();
        assert_eq!(json, serde_json::json!({"data": expected, "n": 1}));

        let reservation = memory.reserve(0, "").await.unwrap();
        let small = json_list(elements([1, 2].into_iter()), reservation).into_body();
        assert_eq!(small.collect().await.unwrap().to_bytes(), &b"[1,2]"[..]);
        let reservation = memory.reserve(0, "").await.unwrap();
        let lists = [vec![1, 2], vec![], vec![3]].into_iter().map(Vec::into_iter);
        let nested = json_list(nested_elements(lists), reservation).into_body();
        assert_eq!(nested.collect().await.unwrap().to_bytes(), &b"[[1,2],[],[3]]"[..]);
    }
}
