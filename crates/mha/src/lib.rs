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
//! - [`SelfAttention`], [`CausalSelfAttention`], [`CrossAttention`]: thin wrappers over
//! - [`MultiHeadAttention`]: project, attend, merge; attend is
//! - [`scaled_dot_product_attention`], under an
//! - [`AttentionMask`]
//! - [`KvCache`], [`Memory`]: keys and values that stay from call to call
//! - [`HeadWeights`], [`Dropout`], [`Init`]: to look inside, and to train
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
//!
//! # Beside others
//! `torch.nn.MultiheadAttention` (PyTorch 2.15), Keras's `MultiHeadAttention` (3.15), burn-nn's
//! (0.22), and `attention::flash_attn` of candle-nn (0.11.1), which attends on a CPU and has no
//! projections. The last column is the test of this project that would fail if ours were otherwise;
//! `candle_nn_attends_as_the_table_says` holds candle-nn's column.
//!
//! | | here | PyTorch | Keras | burn | candle-nn | test |
//! |---|---|---|---|---|---|---|
//! | a boolean mask says | 1 = may attend; other values are an error | true = hidden | true = may attend | true = hidden | additive only | `what_has_the_other_meaning_is_refused` |
//! | a query that sees no key | zeros, in output and weights | NaN, or zeros without weights | zeros with weights, else numbers | the mean over the hidden keys | zeros, if the mask is −∞ | `any_mask_in_any_dtype` |
//! | NaN in a hidden key | reaches nothing | reaches the output | reaches the output | reaches the output | reaches nothing, if the mask is −∞ | `any_mask_in_any_dtype` |
//! | f16, bf16 | scores and softmax in f32 | by backend | by policy | in the dtype | scores and softmax in f32 | `any_mask_in_any_dtype` |
//! | causal | in the type, with offset | a mask, and a hint | an argument | a mask | in the type, with offset | `a_causal_forward_is_its_steps_however_split` |
//! | cache of keys and values | with a capacity that is an error to exceed | – | – | recomputes the scores of all | grows beyond its capacity | `a_cache_can_be_cut_and_copied` |
//! | keys and values projected once for many calls | [`Memory`] | – | – | – | – | `causal_and_cross_attention_equal_pytorch` |
//! | heads that share keys and values | yes, without copies | – | another layer | – | yes, without copies | `groups_equal_heads_with_repeated_keys_and_values` |
//! | keys, values of other width | yes | yes | yes | – | – | `multi_head_attention_equals_pytorch` |
//! | width of a head's values apart | yes | – | yes | – | – | `any_mask_in_any_dtype` |
//! | biases | each of four by itself | all or none | all or none | each by itself | – | `each_projection_has_a_bias_of_its_own` |
//! | weights | of chosen heads, or their mean | all, or their mean | all | all, always | – | `chosen_weights_are_those_of_all` |
//! | heads turned off, pruned | yes | – | – | – | – | `pruned_heads_are_those_turned_off` |
//! | dropout from a seed of its own | yes | – | yes | – | – | `dropout_keeps_the_mean_and_follows_its_seed` |
#![forbid(unsafe_code)]

mod causal_self_attention;
mod config;
pub mod cpu;
mod cross_attention;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dropout;
mod error;
mod init;
mod kv_cache;
mod linear;
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
pub use linear::Linear;
pub use mask::AttentionMask;
pub use mha_kernels::ComputeType as Format;
pub use multi_head::MultiHeadAttention;
pub use sdpa::{scaled_dot_product_attention, scaled_dot_product_attention_with_weights};
pub use self_attention::SelfAttention;
pub use weights::{AttentionOptions, HeadWeights};
