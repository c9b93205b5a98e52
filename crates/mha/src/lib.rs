//! Multi-head attention as candle modules.
//!
//! | letter | meaning |
//! |---|---|
//! | B | batch size |
//! | T, S | query (target) length, key (source) length |
//! | H, D | number of heads, `head_dim` |
//! | E | `hidden_size`, `H·D` |
//! | N | tokens of a packed batch |
//!
//! `q`, `k` and `v` are `(B, H, T|S, D)`, hidden states are `(B, T, E)`. Packed sequences are
//! `(1, N, E)` with a [block-diagonal mask](AttentionMask::block_diagonal). In a mask,
//! `1 = may attend`.
//!
//! # Modules
//! [`mod@reference`] is multi-head attention as in the textbook, in 40 lines: start there to learn how
//! it works. The types, from the outside in:
//!
//! - [`SelfAttention`], [`CausalSelfAttention`], [`CrossAttention`]: wrappers of
//!   [`MultiHeadAttention`]
//! - [`MultiHeadAttention`]: project, attend, merge, with the sizes of an [`AttentionConfig`]
//! - [`scaled_dot_product_attention`]: the attention of projected queries, keys and values
//! - [`AttentionMask`]: which keys a query may attend to
//! - [`AttentionOptions`]: returned weights ([`HeadWeights`]), [`Dropout`], and a transformation of
//!   queries and keys ([`QueryKeyTransform`])
//! - [`KvCache`], [`Memory`]: keys and values that are kept from call to call
//! - [`ops`]: the operations under these modules ([`Linear`], [`LayerNorm`], [`Activation`] and
//!   others), each of which chooses between CUDA kernel, CPU kernel and candle
//! - [`Init`]: initial weights for training
//!
//! # Examples
//! The attention weights of a head:
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
//! | a boolean mask says | 1 = may attend; other values are an error | true = hidden | true = may attend | true = hidden | additive only | `additive_and_boolean_masks_are_not_mistaken_for_each_other` |
//! | a query that sees no key | zeros, in output and weights | NaN, or zeros without weights | zeros with weights, else numbers | the mean over the hidden keys | zeros, if the mask is −∞ | `any_mask_in_any_dtype` |
//! | NaN in a hidden key | reaches nothing | reaches the output | reaches the output | reaches the output | reaches nothing, if the mask is −∞ | `any_mask_in_any_dtype` |
//! | f16, bf16 | scores and softmax in f32 | by backend | by policy | in the dtype | scores and softmax in f32 | `any_mask_in_any_dtype` |
//! | causal | in the type, with offset | a mask, and a hint | an argument | a mask | in the type, with offset | `a_causal_forward_is_its_steps_however_split` |
//! | cache of keys and values | with a capacity that is an error to exceed | – | – | recomputes the scores of all | grows beyond its capacity | `a_truncated_copied_or_reordered_cache_continues_correctly` |
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
mod cross_attention;
mod dropout;
mod error;
mod init;
mod kv_cache;
mod mask;
mod multi_head;
pub mod ops;
mod options;
pub mod reference;
mod sdpa;
mod self_attention;
mod shape;
mod weights;

pub use causal_self_attention::CausalSelfAttention;
pub use config::{AttentionConfig, ProjectionBias};
pub use cross_attention::CrossAttention;
pub use dropout::Dropout;
pub use error::{Error, Result};
pub use init::Init;
pub use kv_cache::{KvCache, Memory};
pub use mask::AttentionMask;
pub use mha_kernels::ComputeType;
pub use multi_head::MultiHeadAttention;
pub use ops::{Activation, LayerNorm, Linear};
pub use options::{AttentionOptions, QueryKeyTransform};
pub use sdpa::{scaled_dot_product_attention, scaled_dot_product_attention_with_weights};
pub use self_attention::SelfAttention;
pub use weights::HeadWeights;
