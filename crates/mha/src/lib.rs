//! Multi-head attention as candle modules.
//!
//! | letter | meaning |
//! |---|---|
//! | B | batch size |
//! | T, S | query (target) length, key (source) length |
//! | E | `hidden_size` |
//! | H, D | number of heads, `head_dim`; D is E / H by default |
//! | G | number of key-value heads; H unless heads share keys and values |
//! | V | width of a head's values; D by default |
//! | N | tokens of a ragged batch |
//!
//! `q` is `(B, H, T, D)`, `k` is `(B, G, S, D)`, `v` is `(B, G, S, V)`; hidden states are
//! `(B, T, E)`. Ragged sequences are `(1, N, E)` with a mask from
//! [`AttentionMask::with_sequences`]. In a mask, `1 = may attend`.
//!
//! # Modules
//! [`mod@reference`] is textbook multi-head attention in 40 lines: start there to learn how it
//! works. The main items:
//!
//! - [`SelfAttention`], [`CausalSelfAttention`], [`CrossAttention`]: wrappers of
//!   [`MultiHeadAttention`]
//! - [`MultiHeadAttention`]: project, attend, merge, with the sizes of an [`AttentionConfig`]
//! - [`scaled_dot_product_attention`]: the attention of projected queries, keys and values
//! - [`AttentionMask`]: which keys a query may attend to; [`LoweredMask`]: the same for several
//!   layers
//! - [`AttentionOptions`]: returned weights ([`HeadWeights`]), [`Dropout`], a transformation of
//!   queries and keys ([`QueryKeyTransform`]), and the relative positions of disentangled attention
//!   ([`DisentangledPositions`])
//! - [`QueryKeyNorm`]: RMS normalisation of each head's queries and keys
//! - positions: [`Rotary`] with a [`RotaryScaling`] rotates queries and keys; [`RelativeBias`] and
//!   [`alibi()`] compute biases for [`AttentionMask::with_distance_bias`]
//! - [`KvCache`], [`Memory`]: keys and values that are kept between calls
//! - [`Init`]: initial weights for training
//!
//! The projections and the rotation are operations of the crate [`ops`].
//!
//! # Features
//! - `cuda`: kernels for NVIDIA GPUs. The build needs nvcc.
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
//! # Comparison with other libraries
//! The table compares this crate with PyTorch's `torch.nn.MultiheadAttention` (2.15), Keras's
//! `MultiHeadAttention` (3.15), burn-nn's `MultiHeadAttention` (0.22) and candle-nn's
//! `attention::flash_attn` (0.11.1), which runs on a CPU and has no projections. The last column
//! names the test that checks the column "here"; `candle_nn_attention_matches_the_comparison_table`
//! checks the masks, the shared heads and the cache of the column "candle-nn".
//!
//! | | here | PyTorch | Keras | burn | candle-nn | test |
//! |---|---|---|---|---|---|---|
//! | boolean mask | 1 = may attend; values other than 0 and 1 are an error | true = hidden | true = may attend | true = hidden | additive masks only | `additive_and_boolean_masks_are_not_mistaken_for_each_other` |
//! | query with no visible key | zeros in output and weights | NaN; zeros in training mode if no weights are returned | zeros if weights are returned, else other values | mean of the hidden values | zeros if the mask is −∞ | `attention_equals_the_reference_with_any_mask_and_dtype` |
//! | NaN in a hidden key | does not affect the output | reaches the output | reaches the output | reaches the output | does not affect the output if the mask is −∞ | `attention_equals_the_reference_with_any_mask_and_dtype` |
//! | f16, bf16 | scores and softmax in f32 | depends on the backend | depends on the dtype policy | scores in the input dtype; softmax depends on the backend | scores and softmax in f32 | `attention_equals_the_reference_with_any_mask_and_dtype` |
//! | causal mask | built in, with offset | mask argument and a hint | flag | mask argument | built in, with offset | `cached_steps_of_any_length_equal_the_full_forward` |
//! | key-value cache | fixed capacity; exceeding it is an error | – | – | recomputes all scores | grows beyond its capacity | `a_truncated_copied_or_reordered_cache_continues_correctly` |
//! | keys and values projected once for many calls | [`Memory`] | – | – | `MhaCache`, for cross-attention | – | `causal_and_cross_attention_equal_pytorch` |
//! | grouped-query attention | yes, without copies | – | separate layer | separate layer, with copies | yes, without copies | `grouped_heads_equal_heads_with_repeated_keys_and_values` |
//! | keys and values of another width than E | yes | yes | yes | separate layer | – | `multi_head_attention_equals_pytorch` |
//! | values of another width than the keys | yes | – | yes | – | – | `attention_equals_the_reference_with_any_mask_and_dtype` |
//! | biases of the projections | one switch per projection | all or none | all or none | one switch per projection | – | `each_projection_has_its_own_bias` |
//! | returned weights | of chosen heads, or the mean | all, or the mean | all | all, always | – | `weights_of_chosen_heads_equal_slices_of_all_weights` |
//! | masking and pruning heads | yes | – | – | – | – | `pruning_heads_equals_masking_them` |
//! | dropout with its own seed | yes | – | yes | – | – | `dropout_preserves_the_mean_and_follows_its_seed` |
#![forbid(unsafe_code)]

mod alibi;
mod causal_self_attention;
mod config;
mod cross_attention;
mod disentangled;
mod dropout;
mod error;
mod head_norms;
mod init;
mod kv_cache;
mod mask;
mod multi_head;
mod options;
pub mod reference;
mod relative_bias;
mod rotary;
mod rotary_scaling;
mod sdpa;
mod self_attention;
mod shape;
#[cfg(test)]
mod testing;
mod weights;

pub use alibi::{alibi, alibi_slopes};
pub use causal_self_attention::CausalSelfAttention;
pub use config::{AttentionConfig, ProjectionBias};
pub use cross_attention::CrossAttention;
pub use disentangled::{DisentangledPositions, log_relative_position};
pub use dropout::Dropout;
pub use error::{Error, Result};
pub use head_norms::{HeadNorms, QueryKeyNorm};
pub use init::Init;
pub use kv_cache::{KvCache, Memory};
pub use mask::{AttentionMask, LoweredMask};
pub use multi_head::MultiHeadAttention;
pub use ops::ComputeType;
pub use options::{AttentionOptions, QueryKeyTransform};
pub use relative_bias::{RelativeBias, relative_position_bucket};
pub use rotary::{Rotary, RotaryAt};
pub use rotary_scaling::RotaryScaling;
pub use sdpa::{scaled_dot_product_attention, scaled_dot_product_attention_with_weights};
pub use self_attention::SelfAttention;
pub use shape::check_offsets;
pub use weights::HeadWeights;
