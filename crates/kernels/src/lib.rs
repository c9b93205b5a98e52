//! CPU kernels of the transformer block: slices in, slices out, no tensors.
//!
//! All the `unsafe` of the project's arithmetic is here. Each kernel is written once over vectors
//! of any width, so that the scalar one is the same source as the fast ones:
//!
//! - [`linear()`]: `activation(x·Wᵀ + b)` with weights packed beforehand, in f32, bf16 or int8
//! - [`attention()`]: `softmax(q·kᵀ · scale + bias)·v`, some queries and keys at a time
//! - [`add_layer_norm`]: residual and layer normalisation in one pass
//! - [`embed_layer_norm`]: three lookups, their sum and layer normalisation in one pass
//! - [`mean_pool`]: the mean over the rows of each sequence
//! - [`cosines()`]: the cosines of vectors with queries
//! - [`peak()`]: what the processor could multiply at most
//! - [`Isa`]: which instructions they use, chosen once, or by the variable `MHA_ISA`

mod attention;
mod buffers;
mod cosines;
mod embed;
mod gemm;
mod isa;
mod lanes;
mod math;
mod norm;
mod number;
mod peak;
mod pool;
mod team;
#[cfg(test)]
mod tests;

pub use attention::{Attention, Broadcast, Sequence, Strided, attention};
pub use buffers::zeros;
pub use cosines::cosines;
pub use embed::{Lookup, NoRow, Table, embed_layer_norm};
pub use gemm::{Format, LinearMap, PackedLinear, chain, linear};
pub use isa::{Isa, IsaError};
pub use math::Activation;
pub use norm::add_layer_norm;
pub use number::Number;
pub use peak::peak;
pub use pool::mean_pool;
