//! The JSON bodies of requests.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    body::Body,
    extract::{FromRequest, Request},
    http::{HeaderMap, HeaderValue, Version, header},
};
use http_body_util::BodyExt;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::{error::Category, value::RawValue};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::OwnedSemaphorePermit,
    task::block_in_place,
    time::timeout,
};

use crate::{
    Models,
    failure::{Failure, Kind},
};

/// The time for reading the body of a refused request. A client that still sends when the
/// connection is closed may lose the response.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Bodies of more than this many bytes are parsed while the other tasks of the thread move to
/// another thread.
const LARGE_BODY: usize = 64 << 10;

/// Maximum number of bytes that are allocated for a body before any of it has arrived.
const FIRST_CAPACITY: usize = 64 << 10;

/// The parsed body of a request, with the reservation of its bytes.
pub struct Input<T> {
    pub value: T,
    _bytes: Reserved,
}

impl<T: DeserializeOwned> FromRequest<Models> for Input<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, models: &Models) -> Result<Self, Failure> {
        let (body, bytes) = receive(request, models).await?;
        Ok(Self { value: parse(&body)?, _bytes: bytes })
    }
}

/// The body of a request, of which only some fields are parsed.
pub struct Partial<T> {
    pub fields: T,
    body: Vec<u8>,
    bytes: Reserved,
}

impl<T: DeserializeOwned> FromRequest<Models> for Partial<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, models: &Models) -> Result<Self, Failure> {
        let (body, bytes) = receive(request, models).await?;
        Ok(Self { fields: parse(&body)?, body, bytes })
    }
}

impl<T> Partial<T> {
    /// Parses the whole body.
    ///
    /// # Errors
    /// [`Kind::Field`] if a field is missing or unknown, or has the wrong type.
    pub fn parse<U: DeserializeOwned>(self) -> Result<Input<U>, Failure> {
        Ok(Input { value: parse(&self.body)?, _bytes: self.bytes })
    }
}

/// The type of a field that is not parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldType {
    #[default]
    Null,
    Object,
    Other,
}

impl<'de> Deserialize<'de> for FieldType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Borrows the text of the value from the body. Its first character determines the type.
        let value = <&RawValue>::deserialize(deserializer)?.get();
        Ok(match value.as_bytes().first() {
            Some(b'n') => Self::Null,
            Some(b'{') => Self::Object,
            _ => Self::Other,
        })
    }
}

/// Holds the permit of a request; there are [`Limits::max_requests`](crate::Limits) permits. The
/// middleware puts an empty `Held` into the extensions of the request, and [`receive`] sets the
/// permit. The middleware keeps the `Held` until the handler returns, or until a large response is
/// sent.
#[derive(Clone, Debug, Default)]
pub struct Held(Arc<OnceLock<OwnedSemaphorePermit>>);

impl Held {
    /// Sets the permit.
    pub fn set(&self, permit: OwnedSemaphorePermit) {
        self.0.set(permit).ok(); // a request has one permit
    }
}

/// Receives the body of a request, and takes a permit for the request.
async fn receive(request: Request, models: &Models) -> Result<(Vec<u8>, Reserved), Failure> {
    if let Err(failure) = check_type(request.headers()) {
        return Err(refuse(failure, request).await);
    }
    let held: Option<Held> = request.extensions().get().cloned();
    let (body, reserved) = read(request, models).await?;
    // The permit is taken after the whole body has arrived, so that slow clients hold none.
    let permit = models.enter()?;
    if models.limits().log_texts {
        // The text log escapes a field that is a `str`, but not one in `Display` form (`%body`).
        tracing::info!(body = String::from_utf8_lossy(&body).as_ref(), "body");
    }
    held.unwrap_or_default().set(permit);
    Ok((body, reserved))
}

/// # Errors
/// [`Kind::MediaType`] if the body is not declared as JSON, or is compressed.
fn check_type(headers: &HeaderMap) -> Result<(), Failure> {
    if let Some(coding) = headers.get(header::CONTENT_ENCODING)
        && !coding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        let coding = String::from_utf8_lossy(coding.as_bytes());
        let message = format!("content-encoding {coding:?}: expected a body without compression");
        return Err(Failure::new(Kind::MediaType, message));
    }
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = value.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    match essence.eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => {
            let message = format!("content-type {essence:?}: expected application/json");
            Err(Failure::new(Kind::MediaType, message))
        }
    }
}

/// The length that the header declares.
fn declared_length(request: &Request) -> Option<usize> {
    request.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Returns the failure of a request that is refused because of its header. The body is read and
/// discarded, unless the client waits for the response before it sends the body: reading would make
/// hyper send `100 Continue` first.
pub async fn refuse(failure: Failure, request: Request) -> Failure {
    let closes = failure.closes();
    let is_read = !expects_continue(&request) && discard(request.into_body()).await;
    failure.with_body_read(is_read && !closes)
}

/// Whether the client sends the body only after the response `100 Continue`.
fn expects_continue(request: &Request) -> bool {
    let expect = request.headers().get(header::EXPECT);
    let is_continue = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    request.version() >= Version::HTTP_11 && expect.is_some_and(is_continue)
}

/// Reads and discards a body. Returns whether all of it arrived within [`DISCARD_TIME`].
async fn discard(mut body: Body) -> bool {
    let read = async {
        loop {
            match body.frame().await {
                None => return true,
                Some(Err(_)) => return false,
                Some(Ok(_)) => {}
            }
        }
    };
    timeout(DISCARD_TIME, read).await.unwrap_or(false)
}

/// Reads a body of at most [`Limits::max_body`](crate::Limits::max_body) bytes, and counts its
/// bytes among those in memory.
///
/// # Errors
/// [`Kind::BodySize`] for a larger body; [`Kind::Overloaded`] if there are too many bytes in
/// memory; [`Kind::Invalid`] for a body that ends early.
async fn read(request: Request, models: &Models) -> Result<(Vec<u8>, Reserved), Failure> {
    let max = models.limits().max_body;
    let too_large = || {
        let message =
            format!("the body is too large: expected at most {max} bytes; send several requests");
        Failure::new(Kind::BodySize, message)
    };
    let declared = declared_length(&request).unwrap_or(0);
    if declared > max {
        return Err(refuse(too_large(), request).await);
    }
    let mut bytes = Vec::with_capacity(declared.min(FIRST_CAPACITY));
    // Unwritten pages take no physical memory, so only received bytes are counted.
    let mut reserved = models.body_reservation();
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let message = format!("the body cannot be read: {error}");
            Failure::new(Kind::Invalid, message).with_body_read(false)
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > max {
            drop((bytes, reserved));
            return Err(too_large().with_body_read(discard(body).await));
        }
        if let Err(failure) = reserved.add(data.len()) {
            drop((bytes, reserved));
            return Err(failure.with_body_read(discard(body).await));
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, reserved))
}

/// A reservation of bytes in memory for a body or a response. Dropping it releases the bytes.
pub struct Reserved {
    /// The noun for the items in messages.
    items: &'static str,
    all: Arc<AtomicUsize>,
    own: usize,
    max: usize,
}

impl Reserved {
    /// A reservation of 0 bytes. `all` is the number of bytes that all requests have reserved;
    /// `max` is its limit. `items` is the noun for the bodies or responses in messages.
    pub fn new(items: &'static str, all: Arc<AtomicUsize>, max: usize) -> Self {
        Self { items, all, own: 0, max }
    }

    /// Reserves more bytes.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if there are too many bytes in memory. A reservation is never refused
    /// while it is the only one.
    pub fn add(&mut self, bytes: usize) -> Result<(), Failure> {
        self.own += bytes;
        let all = self.all.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if all > self.max && all > self.own {
            let Self { items, max, .. } = self;
            let message = format!(
                "{items} are too large together: expected at most {max} bytes; try again later"
            );
            return Err(Failure::overloaded(message, 1));
        }
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.all.fetch_sub(self.own, Ordering::Relaxed);
    }
}

/// # Errors
/// [`Kind::Invalid`] if the body is not JSON; [`Kind::Field`] if a field is missing or unknown, or
/// has the wrong type.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    without_blocking_others(body.len() > LARGE_BODY, || parse_here(body))
}

/// Calls `f`. If `is_large`, the call may take milliseconds: on a runtime with several threads, the
/// other tasks of this thread are moved to another thread first.
pub fn without_blocking_others<T>(is_large: bool, f: impl FnOnce() -> T) -> T {
    let is_multi = || {
        let runtime = Handle::try_current();
        runtime.is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
    };
    match is_large && is_multi() {
        true => block_in_place(f),
        false => f(),
    }
}

fn parse_here<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    // For an enum, serde_json reports a wrong type as a syntax error, so test whether the body is
    // JSON at all. `IgnoredAny` does not test whether strings are UTF-8.
    let is_json =
        || str::from_utf8(body).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
    // Without this check, serde would accept an array of the fields' values in order.
    if !body.trim_ascii_start().starts_with(b"{") && is_json() {
        let message = "the body has the wrong type: expected a JSON object";
        return Err(Failure::new(Kind::Field, message));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let source = error.into_inner();
        match source.classify() {
            Category::Data => wrong_field(&path, &source),
            _ if is_json() => wrong_field(&path, &source),
            _ => Failure::new(Kind::Invalid, format!("the body is not valid JSON: {source}")),
        }
    })?;
    json.end().map_err(|error| {
        Failure::new(Kind::Invalid, format!("the body is not valid JSON: {error}"))
    })?;
    Ok(value)
}

/// The failure of a field; `path` is `.` for the whole body, also if a field of it is missing.
fn wrong_field(path: &str, source: &serde_json::Error) -> Failure {
    if path != "." {
        return Failure::new(Kind::Field, format!("{path}: {source}")).with_field(path);
    }
    let message = source.to_string();
    let failure = Failure::new(Kind::Field, &message);
    match message.strip_prefix("missing field `").and_then(|rest| rest.split_once('`')) {
        Some((field, _)) => failure.with_field(field),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        _top: u8,
        #[serde(default)]
        _join: Option<Join>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Join {
        First,
    }

    #[test]
    fn errors_name_the_field() {
        let cases: [(&[u8], Kind, &str); 7] = [
            (b"{\"_top\": 1, \"_join\": 1}", Kind::Field, "_join: "),
            (b"{\"_top\": 1, \"_join\": \"last\"}", Kind::Field, "_join: unknown variant `last`"),
            (b"{\"_top\": \"x\"}", Kind::Field, "_top: invalid type: string \"x\", expected u8"),
            (b"{\"_top\": 1, \"other\": 2}", Kind::Field, "other: unknown field"),
            (b"{\"_top\": 1", Kind::Invalid, "the body is not valid JSON: EOF"),
            (b"{\"_top\": 1} {}", Kind::Invalid, "the body is not valid JSON: trailing"),
            (b"{\"_top\": \"\xff\"}", Kind::Invalid, "the body is not valid JSON"),
        ];
        for (body, kind, message) in cases {
            let failure = parse::<Body>(body).unwrap_err();
            assert_eq!(failure.kind(), kind, "{}", failure.message());
            assert!(failure.message().starts_with(message), "{}", failure.message());
        }
    }

    #[test]
    fn bytes_in_memory_are_limited_and_given_back() {
        let all = Arc::new(AtomicUsize::new(0));
        let mut first = Reserved::new("bodies", all.clone(), 10);
        assert!(first.add(7).is_ok());
        let mut second = Reserved::new("bodies", all.clone(), 10);
        assert_eq!(second.add(4).unwrap_err().kind(), Kind::Overloaded);
        drop(second);
        assert!(first.add(3).is_ok());
        assert!(first.add(90).is_ok(), "the only reservation is never refused");
        drop(first);
        assert_eq!(all.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let failure = parse::<Body>(&vec![b'['; 100_000]).unwrap_err();
        assert!(matches!(failure.kind(), Kind::Invalid | Kind::Field));
        for body in ["[".repeat(100_000), "{\"a\":".repeat(100_000)] {
            let failure = parse::<serde_json::Value>(body.as_bytes()).unwrap_err();
            assert_eq!(failure.kind(), Kind::Invalid);
            assert!(failure.message().contains("recursion limit"), "{}", failure.message());
        }
    }
}
