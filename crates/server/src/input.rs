//! The JSON bodies of requests.

use std::error::Error;

use axum::{
    body::{Bytes, to_bytes},
    extract::{FromRequest, Request},
    http::{HeaderMap, header},
};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, error::Category};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    Models,
    failure::{Failure, Kind},
};

/// The body of a request. The request counts among those in progress until this is dropped.
pub struct Input<T> {
    pub value: T,
    _permit: OwnedSemaphorePermit,
}

impl Input<Value> {
    /// The value as another type.
    ///
    /// # Errors
    /// [`Kind::Field`] if a field is unknown or has the wrong type.
    pub fn parse<T: DeserializeOwned>(self) -> Result<Input<T>, Failure> {
        let value = serde_path_to_error::deserialize(self.value).map_err(|error| {
            let path = error.path().to_string();
            wrong_field(&path, &error.into_inner())
        })?;
        Ok(Input { value, _permit: self._permit })
    }
}

impl<T: DeserializeOwned> FromRequest<Models> for Input<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, models: &Models) -> Result<Self, Failure> {
        check_type(request.headers())?;
        let body = read(request, models.limits().max_body).await?;
        // Only whole bodies count, so that slow senders do not keep others out.
        let permit = models.enter()?;
        if models.limits().log_texts {
            tracing::info!(body = %String::from_utf8_lossy(&body), "body");
        }
        Ok(Self { value: parse(&body)?, _permit: permit })
    }
}

/// # Errors
/// [`Kind::MediaType`] if the body is not declared as JSON.
fn check_type(headers: &HeaderMap) -> Result<(), Failure> {
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

/// Reads a body of at most `max` bytes.
///
/// # Errors
/// [`Kind::BodySize`] for a larger body; [`Kind::Invalid`] for a body that ends early.
async fn read(request: Request, max: usize) -> Result<Bytes, Failure> {
    let too_large = || {
        let message =
            format!("the body is too large: expected at most {max} bytes; send several requests");
        Failure::new(Kind::BodySize, message)
    };
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > max) {
        return Err(too_large());
    }
    to_bytes(request.into_body(), max).await.map_err(|error| {
        // The error of a body that is too large has the message of `LengthLimitError`.
        let is_limit = error.source().is_some_and(|error| error.to_string().contains("limit"));
        match is_limit {
            true => too_large(),
            false => Failure::new(Kind::Invalid, format!("the body cannot be read: {error}")),
        }
    })
}

/// # Errors
/// [`Kind::Invalid`] if the body is not JSON; [`Kind::Field`] if a field is unknown or has the wrong
/// type.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let source = error.into_inner();
        // For an enum, serde_json reports a wrong type as a syntax error.
        let is_json = serde_json::from_slice::<IgnoredAny>(body).is_ok();
        match source.classify() {
            Category::Data => wrong_field(&path, &source),
            _ if is_json => wrong_field(&path, &source),
            _ => Failure::new(Kind::Invalid, format!("the body is not valid JSON: {source}")),
        }
    })?;
    json.end().map_err(|error| {
        Failure::new(Kind::Invalid, format!("the body is not valid JSON: {error}"))
    })?;
    Ok(value)
}

/// The failure of a field; `path` is `.` for the whole body.
fn wrong_field(path: &str, source: &serde_json::Error) -> Failure {
    match path {
        "." => Failure::new(Kind::Field, source),
        _ => Failure::new(Kind::Field, format!("{path}: {source}")).with_field(path),
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
    fn deep_nesting_is_an_error() {
        let failure = parse::<Body>(&vec![b'['; 100_000]).unwrap_err();
        assert!(matches!(failure.kind(), Kind::Invalid | Kind::Field));
    }
}
