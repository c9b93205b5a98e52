//! The operations of a transformer block on candle tensors, one file per operation.
//!
//! Each file chooses the backend of its operation: a CUDA kernel, a CPU kernel or candle's own
//! operations. [`attention()`], [`attention_weights`], [`copy_in_place`], [`rotate_in_place`],
//! [`normalise_heads_in_place`] and [`mean_pool`] compute nothing if no kernel supports the tensors;
//! the caller then uses candle's operations. The kernels compute no gradients, so candle's operations
//! are used for inputs that autograd tracks.
//!
//! | operation | formula | CPU kernel supports | CUDA kernel supports |
//! |---|---|---|---|
//! | [`Linear`] | `activation(x·Wᵀ + b)` | f32 inputs; bf16 inputs with bf16 or int8 weights | f32, f16, bf16 |
//! | [`attention()`] | `softmax(q·kᵀ·scale + bias)·v` | f32, f16, bf16; all masks | f32, f16, bf16; V = D, a multiple of 8 up to 128; ragged sequences, causal, window, bias by distance, relative positions |
//! | [`attention_weights`] | `softmax(q·kᵀ·scale + bias)` | f32, f16, bf16; all masks | – |
//! | [`rotate_in_place`] | rotary position embedding, with or without [`RmsNorm`] of each head before it | f32, bf16 | f32, f16, bf16; B = 1 |
//! | [`normalise_heads_in_place`] | [`RmsNorm`] of each head | f32, bf16 | f32, f16, bf16; B = 1 |
//! | [`LayerNorm`] | `(x − mean)/√(var + ε)·weight + bias`, for x or x + y | f32 | f32, f16, bf16 |
//! | [`RmsNorm`] | `x/√(mean(x²) + ε)·weight`, or `·(1 + weight)`, for x or x + y | f32 | f32, f16, bf16 |
//! | [`add()`] | `x + y` | f32 | – |
//! | [`embed()`] | `LayerNorm(Σ table[ids])`, three tables | f32 and f16 tables, at least one in f32 | f32, f16, bf16 |
//! | [`mean_pool`] | mean over each sequence's tokens | f32 | f32, f16, bf16 |
//! | [`l2_normalize`] | `x / max(‖x‖, 10⁻¹²)` | f32, f16, bf16 | f32 |
//! | [`Activation`] of a tensor | | f32, f16, bf16 | – |
//! | [`copy_in_place`] | `to ← from` | f32, f16, bf16 | – |
//! | [`softmax`](softmax()) | `exp(xᵢⱼ) / Σₗ exp(xᵢₗ)` | f32 slices | – |
//! | [`log_sum_exp`] | `ln Σⱼ exp(xᵢⱼ)` | f32 slices | – |
//! | [`CosineKernel`] | cosines of vectors and queries | f32 slices | – |
//! | [`MaxSim`] | `Σᵢ maxⱼ qᵢ·dⱼ` | f32 and f16 slices | – |
//!
//! [`f32_from_f16`] and [`f32_from_bf16`] convert the values of a checkpoint on the CPU.
//! [`Activation`] is the activation of a linear map. [`Weights`] are the tensors, or the packed
//! arrays, from which a [`Linear`], a [`Table`], a [`LayerNorm`] or an [`RmsNorm`] is built.
//! [`CudaGraphCache`] replays the kernels of small batches on a GPU.
#![forbid(unsafe_code)]

mod activation;
mod add;
mod attention;
mod attention_mask;
mod copy;
mod cosine;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod cuda_graph;
mod embed;
mod error;
mod heads;
mod layer_norm;
mod linear;
mod max_sim;
mod pool;
mod rms_norm;
mod row_norm;
mod softmax;
mod weights;
mod widen;

pub use activation::Activation;
pub use add::add;
pub use attention::{
    RelativeRows, RelativeTerms, Scoring, attention, attention_weights, reads_key_sources,
};
pub use attention_mask::{KernelMask, MaskParts, QueryRange, Sequences};
pub use copy::copy_in_place;
pub use cosine::CosineKernel;
pub use cuda_graph::{CudaGraphCache, check_device, keep_freed_memory};
pub use embed::{Table, embed};
pub use error::{Error, NotLoaded, Result};
pub use heads::{HeadNorms, normalise_heads_in_place, rotate_in_place, table_fits};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use max_sim::{MaxSim, VectorSlice};
pub use mha_kernels::{
    ComputeType, Isa, RowPooling, SharedBytes, max_threads, release_freed_memory, zeros,
};
pub use pool::{l2_normalize, mean_pool};
pub use rms_norm::RmsNorm;
pub use softmax::{log_sum_exp, softmax};
pub use weights::{Loaded, PackedArray, ReadTensor, SharedTensor, WeightSource, Weights, loaded};
pub use widen::{f32_from_bf16, f32_from_f16, widen};
