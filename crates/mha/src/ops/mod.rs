//! The operations of a transformer block on candle tensors, one file per operation.
//!
//! Each file chooses how its operation runs: by a CUDA kernel, by a CPU kernel, or by candle's own
//! operations. No other code chooses. The kernels compute no gradients, so an input that autograd
//! tracks always takes candle's operations.
//!
//! | operation | formula | CPU kernel takes | CUDA kernel takes |
//! |---|---|---|---|
//! | [`Linear`] | `activation(x·Wᵀ + b)` | f32; bf16 beside bf16 or int8 weights | f32, f16, bf16 |
//! | [`attention`] | `softmax(q·kᵀ·scale + bias)·v` | f32, bf16 | packed sequences, D = 32 or 64 |
//! | [`LayerNorm`] | `(x − mean)/√(var + ε)·weight + bias`, of a sum too | f32 | f32, f16, bf16 |
//! | [`embed`] | `LayerNorm(Σ table[ids])` of three tables | f32, f16 tables | f32, f16, bf16 |
//! | [`mean_pool`] | mean over the tokens of each sequence | f32 | f32, f16, bf16 |
//! | [`l2_normalize`] | `x / max(‖x‖, 10⁻¹²)` | – | f32 |
//! | [`CosineKernel`] | cosines of vectors with queries | f32 slices | – |
//!
//! [`Activation`] is the activation of a linear map. [`CudaGraphCache`] replays small batches on a
//! GPU.

mod activation;
mod attention;
mod cosine;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod cuda_graph;
mod embed;
mod layer_norm;
mod linear;
mod pool;

pub use activation::Activation;
pub(crate) use attention::attention;
pub use cosine::CosineKernel;
pub use cuda_graph::{CudaGraphCache, keep_freed_memory};
pub use embed::{compact_table, embed};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use mha_kernels::zeros;
pub use pool::{l2_normalize, mean_pool};
