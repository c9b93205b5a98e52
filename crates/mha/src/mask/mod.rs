//! Attention masks: which keys each query may attend to, `1 = may attend`.
//!
//! [`AttentionMask`] describes a mask. `tensors` converts it to tensors for candle's operations,
//! `kernel` to slices for the CPU kernel.

mod attention_mask;
mod keep;
mod kernel;
mod tensors;

pub use attention_mask::AttentionMask;
pub(crate) use kernel::{BroadcastTensor, KernelMask};
pub(crate) use tensors::{MaskTensors, all_finite};
