//! Attention masks: which keys each query may attend to, `1 = may attend`.
//!
//! [`AttentionMask`] describes a mask. [`LoweredMask`] is the mask for scores of one shape: the
//! parts that the kernels of the crate `ops` compute, and the tensors of `tensors` for candle's
//! operations. `keep` combines the boolean parts of a mask.

mod attention_mask;
mod keep;
mod lowered;
mod tensors;

pub use attention_mask::AttentionMask;
pub use lowered::LoweredMask;
pub(crate) use tensors::MaskTensors;
