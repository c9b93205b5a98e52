//! Attention masks: which keys each query may attend to, `1 = may attend`.
//!
//! [`AttentionMask`] describes a mask. `tensors` converts the description to tensors for candle's
//! operations, and `kernel` converts it to slices for the CPU kernel. Both use `keep` to combine
//! the boolean parts of a mask.

mod attention_mask;
mod keep;
mod kernel;
mod tensors;

pub use attention_mask::AttentionMask;
pub(crate) use kernel::{BroadcastTensor, KernelMask};
pub(crate) use tensors::MaskTensors;
