//! Rules of HTTP/1.1 for the header of a request that hyper leaves to its caller.

use axum::{
    extract::Request,
    http::{Version, header, uri::Authority},
};

use crate::failure::{Failure, Kind};

/// Checks the headers `Host` and `Transfer-Encoding`.
///
/// # Errors
/// [`Kind::Invalid`] unless a request of HTTP/1.1 has one valid header `Host`;
/// [`Kind::TransferCoding`] for another transfer coding than `chunked`.
///
/// # Source
/// RFC 9112, sections 3.2 and 6.1, <https://www.rfc-editor.org/rfc/rfc9112>.
pub fn check(request: &Request) -> Result<(), Failure> {
    let headers = request.headers();
    let mut hosts = headers.get_all(header::HOST).iter();
    let problem = match (hosts.next(), hosts.count()) {
        (None, _) if request.version() < Version::HTTP_11 => None,
        (None, _) => Some("is missing"),
        (Some(host), 0) if is_host(host.as_bytes()) => None,
        (Some(_), 0) => Some("is invalid"),
        (Some(_), _) => Some("is given more than once"),
    };
    if let Some(problem) = problem {
        let message = format!("the header Host {problem}: expected one host, or host:port");
        return Err(Failure::new(Kind::Invalid, message));
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        (Some(coding), _) => {
            let coding = String::from_utf8_lossy(coding.as_bytes());
            let message = format!("transfer-encoding {coding:?}: expected chunked alone");
            Err(Failure::new(Kind::TransferCoding, message).with_body_read(false))
        }
    }
}

/// Whether the value is a host with an optional port. It may be empty.
fn is_host(value: &[u8]) -> bool {
    value.is_empty() || (!value.contains(&b'@') && Authority::try_from(value).is_ok())
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, http::Request};

    use super::*;

    fn kind(version: Version, headers: &[(&str, &str)]) -> Option<Kind> {
        let mut request = Request::builder().version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check(&request.body(Body::empty()).unwrap()).err().map(|failure| failure.kind())
    }

    #[test]
    fn a_request_needs_one_valid_host() {
        for host in ["a", "a.example:8080", "127.0.0.1", "[::1]:80", ""] {
            assert_eq!(kind(Version::HTTP_11, &[("host", host)]), None, "{host:?}");
        }
        for host in ["a b", "user@a", "a/b", "a, b"] {
            assert_eq!(kind(Version::HTTP_11, &[("host", host)]), Some(Kind::Invalid), "{host:?}");
        }
        assert_eq!(kind(Version::HTTP_11, &[]), Some(Kind::Invalid));
        assert_eq!(kind(Version::HTTP_11, &[("host", "a"), ("host", "a")]), Some(Kind::Invalid));
        assert_eq!(kind(Version::HTTP_10, &[]), None);
    }

    #[test]
    fn chunked_is_the_only_transfer_coding() {
        let kind_of_codings = |codings: &[&'static str]| {
            let mut headers = vec![("host", "a")];
            headers.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
            kind(Version::HTTP_11, &headers)
        };
        assert_eq!(kind_of_codings(&["chunked"]), None);
        assert_eq!(kind_of_codings(&["Chunked"]), None);
        for codings in [&["gzip, chunked"][..], &["gzip", "chunked"], &["chunked", "chunked"]] {
            assert_eq!(kind_of_codings(codings), Some(Kind::TransferCoding), "{codings:?}");
        }
    }
}
