//! An HTTP server for encoders: the interfaces of OpenAI, text-embeddings-inference, Cohere and
//! Jina, and the tasks of the command `encodle`. `docs/server.md` describes routes and options.
//!
//! - [`Model`]: a loaded model with its task. [`Models`]: the models of a server by name, and the
//!   thread that computes the requests of many clients in shared batches.
//! - [`router`]: the routes, as an [`axum::Router`] for another program.
//! - [`serve()`]: the routes with API keys, CORS, limits on connections and graceful shutdown.
//!
//! A request passes through these files: `serve.rs` and `connections.rs` (connection), `framing.rs`
//! (header), `responses.rs` (request id, time limit, format of errors), `api_keys.rs` (API key),
//! `input.rs` (JSON), `admission.rs` (limit on requests), `api/` (the route), `registry.rs`
//! (model), `memory.rs` (limit on memory), `tokenizer_pool.rs` (tokens), `engine/` (batches).
//! [`Models`] holds the state that requests share, `app.rs`.
//!
//! # Features
//! - `otel`: continues the OpenTelemetry trace that the header `traceparent` of a request names.
//!
//! # Examples
//! See [`router`].
#![forbid(unsafe_code)]

mod admission;
mod api;
mod api_keys;
mod app;
mod connections;
mod embedding_model;
mod engine;
mod failure;
mod framing;
mod input;
mod limits;
mod memory;
mod metrics;
mod model;
mod models;
mod registry;
mod request_model;
mod responses;
mod sending;
mod serve;
mod tokenizer_pool;
#[cfg(feature = "otel")]
mod traces;

pub use api::router;
pub use api_keys::ApiKeys;
pub use limits::Limits;
pub use model::{Embedding, Error, Model};
pub use models::Models;
pub use serve::{Access, serve};

/// Compiles the Rust block of docs/server.md.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../../docs/server.md")]
    struct ServerPage;
}
