//! The JSON bodies of requests.

use std::{fmt, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{FromRequest, Request},
    http::{HeaderMap, HeaderValue, Version, header},
};
use http_body_util::BodyExt;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    task::block_in_place,
    time::timeout,
};

use crate::{
    admission::PermitSlot,
    api::fields::Object,
    app::App,
    failure::{Failure, Kind},
    memory::BodyReservation,
};

/// The time for reading the body of a refused request. A client that still sends when the
/// connection is closed may lose the response.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Bodies of more than this many bytes are parsed while the other tasks of the thread move to
/// another thread.
const LARGE_BODY: usize = 64 << 10;

/// Maximum number of bytes that are allocated for a body before any of it has arrived.
const FIRST_CAPACITY: usize = 64 << 10;

/// The parsed body of a request, with the reservation of its bytes and of the texts in it.
pub struct Input<T> {
    pub value: T,
    pub bytes: BodyReservation,
}

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Input<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let (body, bytes) = receive(request, app).await?;
        let Object(value) = parse(&body)?;
        Ok(Self { value, bytes })
    }
}

/// The body of a request, of which only some fields are parsed.
pub struct PartialInput<T> {
    pub fields: T,
    body: Vec<u8>,
    bytes: BodyReservation,
}

impl<T: DeserializeOwned> FromRequest<Arc<App>> for PartialInput<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let (body, bytes) = receive(request, app).await?;
        Ok(Self { fields: parse(&body)?, body, bytes })
    }
}

impl<T> PartialInput<T> {
    /// Parses the whole body.
    ///
    /// # Errors
    /// [`Kind::Field`] if a field is missing or unknown, or has the wrong type.
    pub fn parse<U: DeserializeOwned>(self) -> Result<Input<U>, Failure> {
        let Object(value) = parse(&self.body)?;
        Ok(Input { value, bytes: self.bytes })
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

/// Receives the body of a request, and takes a permit for the request.
async fn receive(request: Request, app: &App) -> Result<(Vec<u8>, BodyReservation), Failure> {
    if let Err(failure) = check_type(request.headers()) {
        return Err(with_body_discarded(failure, request).await);
    }
    let slot: Option<PermitSlot> = request.extensions().get().cloned();
    let (body, reservation) = read(request, app).await?;
    // The permit is taken after the whole body has arrived, so that slow clients hold none.
    let permit = app.admission.admit()?;
    if app.limits.log_texts {
        // The text log escapes a field that is a `str`, but not one in `Display` form (`%body`).
        tracing::info!(body = String::from_utf8_lossy(&body).as_ref(), "body");
    }
    slot.unwrap_or_default().fill(permit);
    Ok((body, reservation))
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
    if essence.eq_ignore_ascii_case("application/json") {
        Ok(())
    } else {
        let message = format!("content-type {essence:?}: expected application/json");
        Err(Failure::new(Kind::MediaType, message))
    }
}

/// The length that the header declares.
fn declared_length(request: &Request) -> Option<usize> {
    request.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Returns the failure of a request whose header is refused. The body is read and discarded, unless
/// the client waits for the response before it sends the body: reading would make hyper send
/// `100 Continue` first.
pub async fn with_body_discarded(failure: Failure, request: Request) -> Failure {
    let closes = failure.closes();
    let is_read = !expects_continue(&request) && discard_body(request.into_body()).await;
    failure.with_body_read(is_read && !closes)
}

/// Whether the client sends the body only after the response `100 Continue`.
fn expects_continue(request: &Request) -> bool {
    let expect = request.headers().get(header::EXPECT);
    let is_continue = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    request.version() >= Version::HTTP_11 && expect.is_some_and(is_continue)
}

/// Reads and discards a body. Returns whether all of it arrived within [`DISCARD_TIME`].
pub async fn discard_body(mut body: Body) -> bool {
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
async fn read(request: Request, app: &App) -> Result<(Vec<u8>, BodyReservation), Failure> {
    let max = app.limits.max_body;
    let too_large = || {
        let message =
            format!("the body is too large: expected at most {max} bytes; send several requests");
        Failure::new(Kind::BodySize, message)
    };
    let declared = declared_length(&request).unwrap_or(0);
    if declared > max {
        return Err(with_body_discarded(too_large(), request).await);
    }
    let mut bytes = Vec::with_capacity(declared.min(FIRST_CAPACITY));
    // Unwritten pages take no physical memory, so only received bytes are counted.
    let mut reservation = app.memory.body_reservation();
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            let message = format!("the body cannot be read: {error}");
            Failure::new(Kind::Invalid, message).with_body_read(false)
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > max {
            drop((bytes, reservation));
            return Err(too_large().with_body_read(discard_body(body).await));
        }
        if !reservation.add(data.len() + parsed_bytes(&data)) {
            drop((bytes, reservation));
            let failure =
                app.admission.overload_failure("the bodies of the requests are too large together");
            return Err(failure.with_body_read(discard_body(body).await));
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, reservation))
}

/// An estimate of the memory that parsing a part of a body allocates: its texts, 40 bytes per
/// string or list, and up to 8 bytes per number.
fn parsed_bytes(json: &[u8]) -> usize {
    let cost = |byte: &u8| match byte {
        b'"' => 1 + 40 / 2,
        b'[' => 1 + 40,
        b',' => 1 + 8,
        _ => 1,
    };
    json.iter().map(cost).sum()
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
    if is_large && is_multi() { block_in_place(f) } else { f() }
}

fn parse_here<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    // Without this check, serde would accept an array of the fields' values in order.
    if !body.trim_ascii_start().starts_with(b"{") {
        check_json(body)?;
        let message = "the body has the wrong type: expected a JSON object";
        return Err(Failure::new(Kind::Field, message));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut json);
    if parsed.is_err() || json.end().is_err() {
        check_json(body)?;
    }
    parsed.map_err(|error| field_failure(&error.path().to_string(), error.inner()))
}

/// Any JSON value. Reads all strings and numbers, and keeps none.
struct AnyJson;

impl<'de> Deserialize<'de> for AnyJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyJson)
    }
}

impl<'de> Visitor<'de> for AnyJson {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Self, S::Error> {
        while seq.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self, M::Error> {
        while map.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

/// # Errors
/// [`Kind::Invalid`] for a body that is not JSON, or has a value that no field accepts.
fn check_json(body: &[u8]) -> Result<(), Failure> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let (path, error) = match serde_path_to_error::deserialize::<_, AnyJson>(&mut json) {
        Ok(AnyJson) => match json.end() {
            Ok(()) => return Ok(()),
            Err(error) => (".".to_string(), error),
        },
        Err(error) => (error.path().to_string(), error.into_inner()),
    };
    let problem = error.to_string();
    // The grammar of JSON allows both.
    let message = if problem.contains("hex escape") && is_json(body) {
        format!(
            "{} is not Unicode: expected surrogates in pairs, got a lone surrogate, such as \\ud800; \
             replace it by U+FFFD, in Python with text.encode(\"utf-16\", \
             \"surrogatepass\").decode(\"utf-16\", \"replace\")",
            name_of(&path)
        )
    } else if problem.contains("number out of range") && is_json(body) {
        format!("{} is out of range: expected a number of at most 1.8e308", name_of(&path))
    } else {
        return Err(Failure::new(Kind::Invalid, format!("the body is not valid JSON: {problem}")));
    };
    Err(with_path(Failure::new(Kind::Invalid, message), &path))
}

/// Whether the body has the grammar of JSON. Unlike [`AnyJson`], `IgnoredAny` accepts lone
/// surrogates and numbers of any size; it does not test whether strings are UTF-8.
fn is_json(body: &[u8]) -> bool {
    str::from_utf8(body).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok())
}

/// The name of the whole body in messages.
const BODY: &str = "the body";

/// The name of the value at a path, which is `.` for the whole body. `?` is a field whose name
/// cannot be read; the message names the object instead.
fn name_of(path: &str) -> &str {
    match path.trim_end_matches('?').trim_end_matches('.') {
        "" => BODY,
        name => name,
    }
}

/// serde's words for what is wrong, and those of the message.
const PROBLEMS: [(&str, &str); 4] = [
    ("invalid type: ", "has the wrong type"),
    ("invalid value: ", "is invalid"),
    ("unknown variant ", "is unknown"),
    ("unknown field ", "is an unknown field"),
];

/// The failure of a field, in the words of JSON instead of those of serde and Rust.
fn field_failure(path: &str, source: &serde_json::Error) -> Failure {
    let full = source.to_string();
    let position = format!(" at line {} column {}", source.line(), source.column());
    let message = full.strip_suffix(&position).unwrap_or(&full);
    let name = name_of(path);
    let known = message.rsplit_once(", expected ").and_then(|(found, expected)| {
        let after = |(start, words)| Some((found.strip_prefix(start)?, words));
        let (got, words) = PROBLEMS.into_iter().find_map(after)?;
        let expected = match expected {
            "usize" => "a whole number of at least 0",
            "u32" => "a whole number from 0 to 4294967295",
            expected => expected,
        };
        let got = match got {
            "map" => "an object",
            "sequence" => "a list",
            got => got,
        };
        Some(format!("{name} {words}: expected {expected}, got {got}"))
    });
    if name == BODY
        && let Some(field) = message.strip_prefix("missing field ")
    {
        let failure = Failure::new(Kind::Field, format!("{name} lacks the field {field}"));
        return failure.with_field(field.trim_matches('`'));
    }
    let message = known.unwrap_or_else(|| match message.split_once(" field ") {
        Some(("missing", field)) => format!("{name} lacks the field {field}"),
        Some(("duplicate", field)) => format!("{name} has the field {field} twice"),
        _ => format!("{name}: {message}"),
    });
    with_path(Failure::new(Kind::Field, message), path)
}

fn with_path(failure: Failure, path: &str) -> Failure {
    match name_of(path) {
        BODY => failure,
        name => failure.with_field(name),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::api::fields::{optional_choice, optional_object};

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        #[serde(rename = "top")]
        _top: usize,
        #[serde(default, rename = "in", deserialize_with = "optional_object")]
        _in: Option<Ids>,
        #[serde(default, rename = "join", deserialize_with = "optional_choice")]
        _join: Option<Join>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Ids {
        #[serde(rename = "ids")]
        _ids: Vec<u32>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Join {
        First,
    }

    #[test]
    fn errors_name_the_field() {
        let cases: [(&[u8], &str); 10] = [
            (
                b"{\"top\": \"x\"}",
                "top has the wrong type: expected a whole number of at least 0, \
                                 got string \"x\"",
            ),
            (
                b"{\"top\": -1}",
                "top is invalid: expected a whole number of at least 0, got integer `-1`",
            ),
            (
                b"{\"top\": [1]}",
                "top has the wrong type: expected a whole number of at least 0, got a list",
            ),
            (
                b"{\"top\": 1, \"join\": 1}",
                "join has the wrong type: expected one of `first`, got integer `1`",
            ),
            (b"{\"top\": 1, \"join\": \"last\"}", "join is unknown: expected `first`, got `last`"),
            (
                b"{\"top\": 1, \"in\": {\"ids\": [1, -1]}}",
                "in.ids[1] is invalid: expected a whole number \
                                                     from 0 to 4294967295, got integer `-1`",
            ),
            (b"{\"top\": 1, \"in\": {\"a\": null}}", "in lacks the field `ids`"),
            (b"{\"top\": 1, \"top\": 1}", "the body has the field `top` twice"),
            (
                b"{\"top\": 1, \"other\": 2}",
                "other is an unknown field: expected one of `top`, `in`, `join`, \
                                           got `other`",
            ),
            (b"{}", "the body lacks the field `top`"),
        ];
        for (body, message) in cases {
            let failure = parse::<Object<Body>>(body).err().unwrap();
            assert_eq!((failure.kind(), failure.message()), (Kind::Field, message));
        }
    }

    #[test]
    fn a_body_that_is_not_json_is_invalid() {
        let cases: [(&[u8], &str); 8] = [
            (b"{\"top\": 1", "the body is not valid JSON: EOF"),
            (b"{\"top\": 1} {}", "the body is not valid JSON: trailing"),
            (b"{\"in\": \"\xff\"}", "the body is not valid JSON"),
            // The grammar allows these.
            (
                b"{\"in\": {\"ids\": [\"\\ud83d\\ude00\", \"a\\ud800\"]}}",
                "in.ids[1] is not Unicode: ",
            ),
            (b"{\"in\": \"\\ud800\\ud800\"}", "in is not Unicode: expected surrogates in pairs, "),
            (
                b"{\"in\": \"\\udc00\"}",
                "in is not Unicode: expected surrogates in pairs, got a lone",
            ),
            (b"{\"\\ud800\": 1}", "the body is not Unicode: "),
            (b"{\"top\": 1e400}", "top is out of range: "),
        ];
        for (body, message) in cases {
            let failure = parse::<Object<Body>>(body).err().unwrap();
            assert_eq!(failure.kind(), Kind::Invalid, "{}", failure.message());
            assert!(failure.message().starts_with(message), "{}", failure.message());
        }
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
