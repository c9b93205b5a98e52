//! API keys, as bearer tokens.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use axum::{
    extract::{Request, State},
    http::{Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::{
    failure::{Failure, Kind},
    input::with_body_discarded,
};

/// The paths that need no key: they reveal neither texts nor results.
const OPEN: [&str; 7] = ["/", "/docs", "/openapi.json", "/live", "/health", "/ping", "/metrics"];

/// The keys that clients may send in the header `Authorization: Bearer KEY`. Clones share the keys.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<RwLock<Arc<Vec<[u8; 32]>>>>);

/// Prints the number of keys, not their hashes.
impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({} keys)", self.hashes().len())
    }
}

impl ApiKeys {
    /// Trims the keys and keeps only their hashes. Blank keys are left out. Without keys, every
    /// request is accepted.
    pub fn new<S: AsRef<str>>(keys: impl IntoIterator<Item = S>) -> Self {
        let hashes = keys.into_iter().filter_map(|key| {
            let trimmed = key.as_ref().trim();
            (!trimmed.is_empty()).then(|| hash(trimmed.as_bytes()))
        });
        Self(Arc::new(RwLock::new(Arc::new(hashes.collect()))))
    }

    /// Replaces the keys, also those of a server that runs with them. Requests that have been
    /// accepted are answered.
    pub fn replace(&self, keys: &Self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys.hashes();
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.hashes().is_empty()
    }

    fn hashes(&self) -> Arc<Vec<[u8; 32]>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether one of the keys is `key`. The time does not depend on the keys: hashes have equal
    /// lengths, and all of them are compared.
    fn accept(&self, key: &[u8]) -> bool {
        let given = hash(key);
        let hashes = self.hashes();
        let matches = hashes.iter().map(|known| known.ct_eq(&given));
        matches.fold(Choice::from(0), |any, one| any | one).into()
    }
}

fn hash(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// The key in the value of the header `Authorization`, if it has the scheme `Bearer`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let space = value.iter().position(|&byte| byte == b' ')?;
    let (scheme, key) = value.split_at(space);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| key.trim_ascii())
}

/// Refuses requests without a valid key, except `OPTIONS`, and `GET` and `HEAD` of the paths in
/// [`OPEN`].
pub async fn middleware(State(keys): State<ApiKeys>, request: Request, next: Next) -> Response {
    let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
    let is_open = is_read && OPEN.contains(&request.uri().path());
    if keys.is_empty() || is_open || request.method() == Method::OPTIONS {
        return next.run(request).await;
    }
    let value = request.headers().get(header::AUTHORIZATION);
    let message = match value.map(|value| bearer(value.as_bytes())) {
        Some(Some(key)) if keys.accept(key) => return next.run(request).await,
        Some(Some(_)) => "the API key is wrong",
        Some(None) => "the header Authorization is invalid: expected Bearer KEY",
        None => "the API key is missing: expected the header Authorization: Bearer KEY",
    };
    let failure = Failure::new(Kind::Unauthorized, message);
    with_body_discarded(failure, request).await.into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_given_keys_are_accepted() {
        let keys = ApiKeys::new(["one", " two ", ""]);
        for (key, accepted) in [("one", true), ("two", true), ("", false), ("on", false)] {
            assert_eq!(keys.accept(key.as_bytes()), accepted, "{key:?}");
        }
        assert!(ApiKeys::new(["", " "]).is_empty());
        let clone = keys.clone();
        keys.replace(&ApiKeys::new(["three"]));
        assert!(clone.accept(b"three") && !clone.accept(b"one"));
        let key = bearer("bearer schlüssel ".as_bytes()).unwrap();
        assert!(ApiKeys::new(["schlüssel"]).accept(key));
        assert_eq!((bearer(b"Basic one"), bearer(b"one")), (None, None));
    }
}
