//! Matrix products `activation(x·Wᵀ + b)` with packed weights.
//!
//! W, stored as `(out, in)` in a checkpoint, is packed into panels of nr columns of the
//! product. Input rows are converted to the weight's [`ComputeType`](crate::ComputeType). Panels
//! and converted rows consist of packed lanes of 32 bits. A lane holds one f32, two bf16 or four
//! int8 that are adjacent along k. All compute types therefore use the same loops over rows, panels
//! and k. They differ in how rows and weights are packed, in the product of two lanes ([`Dot`](crate::simd::Dot))
//! and, for int8, in the epilogue, which dequantises. On ISAs without bf16 instructions, an input
//! row of bf16 has one f32 per value ([`Dot::INPUT_LANES`](crate::simd::Dot::INPUT_LANES)).
//!
//! From the innermost step outwards:
//! - [`simd`](crate::simd): the product of two lanes, and the microkernel, a tile of mr rows × nr
//!   columns, accumulated in registers
//! - `epilogue`: dequantise, bias, activation, store
//! - `linear`: the loops over tiles, panels and k, and their parallelism; `pooled`: the same with
//!   the rows of each sequence pooled
//!
//! # Invariance
//! k is split into ranges of kc lanes. The products of a range are summed in order, and then the
//! sums of the ranges, so that rounding errors grow with the length of a range rather than with k.
//! AMX continues the sum of the earlier ranges instead, 32 bf16 products at a time, in an order
//! that is the same for every row. An element of the product is therefore bit-identical whatever
//! the other rows of the input and the number of threads are.

mod bf16x3;
mod element;
mod epilogue;
mod int8;
mod linear;
mod pack;
mod pack_input;
mod pooled;

pub(crate) use element::{Element, RowAddresses, Store, WidenedBf16};
pub use linear::{LinearMap, Rows, chain_bf16, chain_f32, linear};
pub use pack::{MAX_INT8_INPUT, PackedArrays, PackedLinear};
pub use pooled::{RowPooling, pooled_linear};
