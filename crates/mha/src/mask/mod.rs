//! Which keys a query may attend to: `1 = may attend`.
//!
//! [`AttentionMask`] is the description; `tensors` turns it into tensors for candle's operations,
//! `kernel` into slices for the CPU kernel.

mod attention_mask;
mod keep;
mod kernel;
mod tensors;

pub use attention_mask::AttentionMask;
pub(crate) use kernel::{BroadcastTensor, KernelMask};
pub(crate) use tensors::{MaskTensors, all_finite};
