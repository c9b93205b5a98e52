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

mod config;
mod error;
mod mask;
mod multi_head;
mod sdpa;
mod self_attention;

pub use config::{AttentionConfig, ProjectionBias};
pub use error::{Error, Result};
pub use mask::AttentionMask;
pub use multi_head::MultiHeadAttention;
pub use sdpa::{scaled_dot_product_attention, scaled_dot_product_attention_with_weights};
pub use self_attention::SelfAttention;
