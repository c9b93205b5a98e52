//! CPU kernels of the transformer block. The functions read slices and return a `Vec`;
//! [`transform_heads_f32`] and [`transform_heads_bf16`] change their argument in place. The crate
//! has no tensor type.
//!
//! - Matrix products with packed weights and fused activations, in f32, bf16 and int8.
//! - Attention, embedding lookup, LayerNorm and RMSNorm, mean pooling and cosine similarity.
//! - AVX-512 (with VNNI and BF16), AMX, AVX2, NEON (with dot products and matrix products of 8-bit
//!   integers and of bf16) and plain Rust, chosen at run time.
//!
//! All `unsafe` code of the project's CPU arithmetic is in this crate.
//!
//! # Symbols
//! B batch · T query (target) length · S key (source) length · H heads · D head_dim · E hidden_size
//! · N tokens of a ragged batch · V width of a head's values · G key-value heads. A product
//! `(m, k) · (k, n)` is computed in register tiles of mr × nr and cache blocks of mc, nc and kc, as
//! in BLIS.
//!
//! # Example
//! Pack a weight `(out, in)` once, then multiply any number of rows with it:
//! ```
//! use mha_kernels::{Activation, ComputeType, Isa, PackedLinear, linear};
//!
//! let isa = Isa::get()?;
//! let weight = PackedLinear::pack(isa, ComputeType::F32, &[1., 2., 3., 4.], 2, 2, Some(&[0., 1.]));
//! let y = linear(isa, &[1., 1., 2., -2.], &[&weight], Activation::Relu); // two rows
//! assert_eq!(y, [3., 8., 0., 0.]);
//! # Ok::<(), mha_kernels::IsaError>(())
//! ```
//!
//! # Modules
//! Each module uses only modules below it in the table.
//!
//! | module | items | computes |
//! |---|---|---|
//! | `peak` | [`peak`](peak()) | the peak arithmetic rate, for benchmarks |
//! | `heads` | [`transform_heads_f32`], [`transform_heads_bf16`] | RMSNorm of each head and rotary position embedding, in place |
//! | `attention` | [`attention_f32`], [`attention_bf16`] | `softmax(q·kᵀ · scale + bias) · v`, block by block |
//! | `attention` | [`attention_weights_f32`] | `softmax(q·kᵀ · scale + bias)` |
//! | `gemm` | [`PackedLinear`], [`linear`](linear()), [`chain_f32`], [`chain_bf16`] | `activation(x·Wᵀ + b)`, one or several in sequence |
//! | `gemm` | [`pooled_linear`] | `pool(x·Wᵀ + b)` over the rows of each sequence |
//! | `embed` | [`embed_layer_norm`] | three table lookups, their sum, layer normalisation |
//! | `norm` | [`add_norm`], [`add_norm_residual`], [`add`] | residual connection, LayerNorm and RMSNorm |
//! | `pool` | [`mean_pool`] | the mean over the rows of each sequence |
//! | `l2_normalize` | [`l2_normalize`](l2_normalize()) | rows of unit length |
//! | `cosine` | [`cosine_similarities`] | cosine similarity of rows and queries |
//! | `softmax` | [`softmax`](softmax()), [`log_sum_exp`] | the softmax of each row, and its normaliser |
//! | `activation`, `math` | [`Activation`], [`activate`] | GELU and other activations, `exp`, `tanh` |
//! | `parallel` | [`max_threads`] | parallel loops with low start-up latency |
//! | `isa` | [`Isa`] | detected instruction sets |
//! | `simd` | | vectors and products of packed lanes, one file per instruction set |
//! | `buffer` | [`zeros`], [`SharedBytes`] | aligned, shared and reusable memory |
//! | `compute_type` | [`ComputeType`] | number formats |
//!
//! Kernels are generic over the vector type in `simd`, which has 16 lanes on every instruction set, so
//! that all instruction sets compute the same bits. The public functions that call kernels are not
//! generic, so kernels are compiled in this crate only.

mod activation;
mod attention;
mod buffer;
mod compute_type;
mod copy;
mod cosine;
mod embed;
mod gemm;
mod heads;
mod isa;
mod l2_normalize;
mod math;
mod norm;
mod parallel;
mod peak;
mod pool;
mod simd;
mod softmax;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod widen;

pub use activation::{Activation, activate};
pub use attention::{
    Attention, Broadcast, DistanceBias, RelativePositions, Sequence, Strided, StridedMut,
    attention_bf16, attention_f32, attention_weights_f32,
};
pub use buffer::{SharedBytes, release_freed_memory, zeros};
pub use compute_type::ComputeType;
pub use copy::copy_tokens;
pub use cosine::cosine_similarities;
pub use embed::{EmbeddingTable, IdOutOfRange, Lookup, embed_layer_norm};
pub use gemm::{
    LinearMap, MAX_INT8_INPUT, PackedArrays, PackedLinear, RowPooling, Rows, chain_bf16, chain_f32,
    linear, pooled_linear,
};
pub use heads::{HeadNorms, Rotation, transform_heads_bf16, transform_heads_f32};
pub use isa::{Isa, IsaError};
pub use l2_normalize::l2_normalize;
pub use norm::{RowNorm, add, add_norm, add_norm_residual};
pub use parallel::{max_threads, serially};
pub use peak::peak;
pub use pool::mean_pool;
pub use softmax::{log_sum_exp, softmax};
pub use widen::f32_from_f16;
