//! Multi-head attention as candle modules.
//!
//! | letter | meaning |
//! |---|---|
//! | B | batch |
//! | T, S | query (target) length, key (source) length |
//! | H, D | heads, width of a head |
//! | E | `hidden_size`, `H·D` |
//! | N | tokens of a packed batch |
//!
//! `q`, `k` and `v` are `(B, H, T|S, D)`, hidden states `(B, T, E)`; packed sequences are
//! `(1, N, E)` under a [block-diagonal mask](AttentionMask::block_diagonal). Masks say
//! `1 = may attend`. In a file's order of reading:
//!
//! - [`AttentionConfig`]: the sizes, and the published ones by name
//! - [`SelfAttention`]: a thin wrapper over
//! - [`MultiHeadAttention`]: project, attend, merge; attend is
//! - [`scaled_dot_product_attention`], under an
//! - [`AttentionMask`]
//!
//! # Examples
//! What each head looks at:
//! ```
//! use candle_core::{Device::Cpu, Tensor};
//! use mha::{AttentionMask, scaled_dot_product_attention_with_weights};
//!
//! // One head, two tokens, D = 1; the second key is twice the first.
//! let x = Tensor::new(&[[[[1f32], [2.]]]], &Cpu)?;
//! let (context, weights) =
//!     scaled_dot_product_attention_with_weights(&x, &x, &x, &AttentionMask::none(), None)?;
//! let weights = weights.flatten_all()?.to_vec1::<f32>()?;
//! assert!((weights[1] - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6); // σ(2 − 1)
//! assert_eq!(context.dims(), [1, 1, 2, 1]);
//! # Ok::<(), mha::Error>(())
//! ```
#![forbid(unsafe_code)]

mod causal_self_attention;
mod config;
mod cross_attention;
mod dropout;
mod error;
mod init;
mod kv_cache;
mod mask;
mod multi_head;
mod sdpa;
mod self_attention;
mod weights;

pub use causal_self_attention::CausalSelfAttention;
pub use config::{AttentionConfig, ProjectionBias};
pub use cross_attention::CrossAttention;
pub use dropout::Dropout;
pub use error::{Error, Result};
pub use init::Init;
pub use kv_cache::{KvCache, Memory};
pub use mask::AttentionMask;
pub use multi_head::MultiHeadAttention;
pub use sdpa::{scaled_dot_product_attention, scaled_dot_product_attention_with_weights};
pub use self_attention::SelfAttention;
pub use weights::{AttentionOptions, HeadWeights};
