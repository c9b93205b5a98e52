//! The reasons for which a request fails, with the status and the body of each interface.

use std::collections::BTreeMap;

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::json;
use utoipa::{
    IntoResponses, ToSchema,
    openapi::{Content, Ref, RefOr, Response as Documented, ResponseBuilder},
};

/// Maximum size, in bytes, of the message and of the field name of a failure. Both may contain
/// parts of the request.
const MAX_MESSAGE: usize = 1 << 10;

/// The interface that a route belongs to. It determines the form of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    OpenAi,
    /// Text-embeddings-inference. All other routes, such as `/tag` and `/answer`, report errors in
    /// its form.
    Tei,
    /// Cohere and Jina.
    Cohere,
}

impl Interface {
    /// The interface of a path.
    pub fn from_path(path: &str) -> Self {
        match path {
            "/v1/rerank" | "/v2/rerank" => Self::Cohere,
            _ if path.starts_with("/v1/") => Self::OpenAi,
            _ => Self::Tei,
        }
    }
}

/// Why a request failed.
#[derive(Clone, Debug)]
pub struct Failure {
    kind: Kind,
    message: String,
    /// The field of the request that is wrong.
    field: Option<String>,
    /// The header `Retry-After`, in seconds.
    retry_after: Option<u64>,
    /// Whether the response closes the connection, because the body of the request was not read.
    closes: bool,
}

/// The kinds of failures. The metric `encodle_failures_total` counts each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The body is not JSON, or a value is invalid.
    Invalid,
    /// A list of texts or of token ids is empty.
    Empty,
    /// A field is missing or unknown, or has the wrong type.
    Field,
    /// The body is too large.
    BodySize,
    /// There are too many texts, a text is too long, or the response would be too large.
    TooLarge,
    /// A text cannot be tokenized, its tokens do not suit the task, or a token id is unknown.
    Tokenizer,
    /// The model cannot do the task, or the computation failed.
    Backend,
    UnknownModel,
    NoRoute,
    Method,
    MediaType,
    /// The transfer coding of the body is not `chunked`.
    TransferCoding,
    Unauthorized,
    Timeout,
    Overloaded,
    /// The models are not loaded, or the server is shutting down.
    Unavailable,
    /// A defect of the server.
    Internal,
}

impl Kind {
    /// The name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Empty => "empty",
            Self::Field => "field",
            Self::BodySize => "body_size",
            Self::TooLarge => "too_large",
            Self::Tokenizer => "tokenizer",
            Self::Backend => "backend",
            Self::UnknownModel => "unknown_model",
            Self::NoRoute => "no_route",
            Self::Method => "method",
            Self::MediaType => "media_type",
            Self::TransferCoding => "transfer_coding",
            Self::Unauthorized => "unauthorized",
            Self::Timeout => "timeout",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
        }
    }

    /// The status of the response.
    pub fn status(self, interface: Interface) -> StatusCode {
        match self {
            Self::Invalid | Self::Empty => StatusCode::BAD_REQUEST,
            Self::Field | Self::TooLarge | Self::Tokenizer | Self::Backend
                if interface != Interface::Tei =>
            {
                StatusCode::BAD_REQUEST
            }
            Self::Field | Self::Tokenizer => StatusCode::UNPROCESSABLE_ENTITY,
            Self::BodySize | Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Backend => StatusCode::FAILED_DEPENDENCY,
            Self::UnknownModel | Self::NoRoute => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::TransferCoding => StatusCode::NOT_IMPLEMENTED,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Timeout => StatusCode::REQUEST_TIMEOUT,
            Self::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `error_type` of text-embeddings-inference.
    fn tei_type(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::Tokenizer => "Tokenizer",
            Self::Backend | Self::Internal => "Backend",
            Self::Overloaded => "Overloaded",
            Self::Unavailable => "Unhealthy",
            _ => "Validation",
        }
    }

    /// The `type` and the `code` of an error of OpenAI.
    fn open_ai_type(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::UnknownModel => ("invalid_request_error", Some("model_not_found")),
            Self::Unauthorized => ("invalid_request_error", Some("invalid_api_key")),
            Self::Overloaded => ("rate_limit_error", Some("rate_limit_exceeded")),
            Self::Timeout => ("server_error", Some("timeout")),
            Self::Unavailable | Self::Internal => ("server_error", None),
            _ => ("invalid_request_error", None),
        }
    }
}

impl Failure {
    pub fn new(kind: Kind, message: impl ToString) -> Self {
        let message = shorten(message.to_string());
        Self { kind, message, field: None, retry_after: None, closes: false }
    }

    /// The failure for an invalid value of the field `field`.
    pub fn invalid(field: &str, message: impl ToString) -> Self {
        Self::new(Kind::Invalid, message).with_field(field)
    }

    /// The failure of a request that is refused because of the load.
    pub fn overloaded(message: impl ToString, retry_after: u64) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(Kind::Overloaded, message) }
    }

    /// The failure of a request that the server cannot answer now.
    pub fn unavailable(message: impl ToString) -> Self {
        Self { retry_after: Some(1), ..Self::new(Kind::Unavailable, message) }
    }

    pub fn with_field(self, field: &str) -> Self {
        Self { field: Some(shorten(field.to_string())), ..self }
    }

    /// Sets the field of a failure that has none, unless the failure is a defect of the server.
    pub fn with_default_field(self, field: &str) -> Self {
        if self.field.is_none() && self.kind != Kind::Internal {
            self.with_field(field)
        } else {
            self
        }
    }

    /// Puts the name of an input before the message.
    pub fn with_name(self, name: &str) -> Self {
        Self { message: shorten(format!("{name}: {}", self.message)), ..self }
    }

    /// Sets whether the body of the request was read. If not, the response closes the connection.
    pub fn with_body_read(self, is_read: bool) -> Self {
        Self { closes: !is_read, ..self }
    }

    pub fn closes(&self) -> bool {
        self.closes
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the message may contain a part of a text or of another value of the request.
    pub fn may_have_text(&self) -> bool {
        matches!(
            self.kind,
            Kind::Invalid
                | Kind::Field
                | Kind::Tokenizer
                | Kind::TooLarge
                | Kind::UnknownModel
                | Kind::MediaType
                | Kind::TransferCoding
        )
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The response in the form of an interface.
    pub fn response(&self, interface: Interface) -> Response {
        let message = self.message.as_str();
        let body = match interface {
            Interface::OpenAi => {
                let (kind, code) = self.kind.open_ai_type();
                let field = &self.field;
                json!({"error": {"message": message, "type": kind, "param": field, "code": code}})
            }
            Interface::Tei => json!({"error": message, "error_type": self.kind.tei_type()}),
            Interface::Cohere => json!({"message": message}),
        };
        let mut response = json_response(&body);
        *response.status_mut() = self.kind.status(interface);
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == Kind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Truncates a text of more than [`MAX_MESSAGE`] bytes at the boundary of a character, and appends
/// an ellipsis.
fn shorten(text: String) -> String {
    if text.len() <= MAX_MESSAGE {
        return text;
    }
    let end = (0..=MAX_MESSAGE).rev().find(|&end| text.is_char_boundary(end));
    format!("{}…", &text[..end.unwrap_or(0)])
}

/// Adds the failure to the response as an extension. The middleware in [`crate::responses`],
/// which knows the interface, writes the body.
impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = self.kind.status(Interface::Tei).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The failure of a request for which the crate `encoder` returns an error. The error determines
/// the kind and the field.
impl From<encoder::Error> for Failure {
    fn from(error: encoder::Error) -> Self {
        use encoder::{ConfigError, Error as E, FileError, InputError as I};
        let kind = match &error {
            E::File(FileError::Tokenizer { .. }) => Kind::Tokenizer,
            E::Config(ConfigError::Value { .. }) => Kind::Invalid,
            E::Input(error) => match error {
                I::LongText { .. }
                | I::TooLong { .. }
                | I::LongQuestion { .. }
                | I::MaskTruncated { .. } => Kind::TooLarge,
                I::EmptySequence { .. } => Kind::Empty,
                I::NoTokens { .. }
                | I::OnlyPairs { .. }
                | I::OnlyPrompt { .. }
                | I::NoMask { .. }
                | I::Id { .. }
                | I::UnknownToken { .. } => Kind::Tokenizer,
                I::NoPrompt { .. } | I::Dimension { .. } | I::NoEncoder => Kind::Invalid,
                _ => Kind::Backend,
            },
            _ => Kind::Backend,
        };
        let field = match &error {
            E::Input(I::NoPrompt { .. }) => Some("prompt_name"),
            E::Input(I::Dimension { .. }) => Some("dimensions"),
            _ => None,
        };
        let failure = Self::new(kind, error);
        match field {
            Some(field) => failure.with_field(field),
            None => failure,
        }
    }
}

/// A response with status 200 and a JSON body.
pub fn json_response(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            ([json], Body::from(bytes)).into_response()
        }
        Err(error) => Failure::new(Kind::Internal, error).into_response(),
    }
}

/// An error of OpenAI's routes.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the schema of the body that Failure::response writes")]
pub struct OpenAiError {
    error: OpenAiErrorBody,
}

#[derive(ToSchema)]
#[expect(dead_code, reason = "the schema of the body that Failure::response writes")]
pub struct OpenAiErrorBody {
    message: String,
    r#type: String,
    /// The field of the request that is wrong.
    param: Option<String>,
    code: Option<String>,
}

/// An error of the routes of text-embeddings-inference, and of the tasks.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the schema of the body that Failure::response writes")]
pub struct TeiError {
    error: String,
    error_type: String,
}

/// An error of the routes of Cohere and Jina.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the schema of the body that Failure::response writes")]
pub struct CohereError {
    message: String,
}

/// The failures of OpenAI's routes, for the OpenAPI document.
pub struct OpenAiFailures;
/// The failures of the routes of text-embeddings-inference and of the tasks, for the OpenAPI
/// document.
pub struct TeiFailures;
/// The failures of the routes of Cohere and Jina, for the OpenAPI document.
pub struct CohereFailures;

impl IntoResponses for OpenAiFailures {
    fn responses() -> BTreeMap<String, RefOr<Documented>> {
        responses(Interface::OpenAi, "OpenAiError")
    }
}

impl IntoResponses for TeiFailures {
    fn responses() -> BTreeMap<String, RefOr<Documented>> {
        responses(Interface::Tei, "TeiError")
    }
}

impl IntoResponses for CohereFailures {
    fn responses() -> BTreeMap<String, RefOr<Documented>> {
        responses(Interface::Cohere, "CohereError")
    }
}

fn responses(interface: Interface, schema: &str) -> BTreeMap<String, RefOr<Documented>> {
    let too_large = match interface {
        Interface::Tei => "the body, the number of texts, a text or the response is too large",
        Interface::OpenAi | Interface::Cohere => "the body is too large",
    };
    let invalid = match interface {
        Interface::Tei => "the body is not JSON, or a value is invalid",
        Interface::OpenAi | Interface::Cohere => {
            "the request is invalid, a text is too long or cannot be tokenized, the model cannot do \
             this task, or the computation failed"
        }
    };
    let kinds = [
        (Kind::Invalid, invalid),
        (Kind::Unauthorized, "the API key is missing or wrong"),
        (Kind::UnknownModel, "the model does not exist"),
        (Kind::Timeout, "the request was not received or answered in time"),
        (Kind::BodySize, too_large),
        (Kind::MediaType, "the body's type is not application/json, or the body is compressed"),
        (Kind::Overloaded, "too many requests; try again after `Retry-After` seconds"),
        (Kind::Internal, "a defect of the server"),
        (Kind::TransferCoding, "the body has another transfer coding than chunked"),
        (Kind::Unavailable, "the models are not loaded yet, or the server is shutting down"),
    ];
    let tei_kinds = [
        (
            Kind::Field,
            "a field is missing or unknown, or has the wrong type, or a text cannot be tokenized",
        ),
        (Kind::Backend, "the model cannot do this task, or the computation failed"),
    ];
    let more_kinds = tei_kinds.into_iter().filter(|_| interface == Interface::Tei);
    let response = |(kind, description): (Kind, &str)| {
        let content = Content::new(Some(Ref::from_schema_name(schema)));
        let response =
            ResponseBuilder::new().description(description).content("application/json", content);
        (kind.status(interface).as_str().to_string(), response.build().into())
    };
    kinds.into_iter().chain(more_kinds).map(response).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_and_field_names_are_truncated() {
        let short = "é".repeat(MAX_MESSAGE / 2);
        let failure = Failure::invalid(&short, &short);
        assert_eq!((failure.message(), failure.field.as_deref()), (&*short, Some(&*short)));
        let long = format!("a{}", "é".repeat(MAX_MESSAGE));
        let failure = Failure::invalid(&long, &long).with_name("text 0");
        for text in [failure.message(), failure.field.as_deref().unwrap()] {
            assert!(text.ends_with("é…") && text.len() <= MAX_MESSAGE + "…".len(), "{text}");
        }
    }
}
