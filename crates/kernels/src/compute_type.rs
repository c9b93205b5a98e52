//! The number formats that a matrix product computes in.

/// The number format of both operands of a matrix product. Products are accumulated in f32, or in
/// i32 for int8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ComputeType {
    /// f32. On AMX, f32 operands are split into three bf16 terms (BF16x3), which has limits: a
    /// magnitude above 3.396e38 gives NaN, and values and products below 2⁻¹⁰² lose bits.
    #[default]
    F32,
    /// Both operands are rounded to bf16 (an 8-bit significand).
    Bf16,
    /// Both operands are rotated by a Hadamard matrix and quantised to 8 bits: the weight to
    /// −127..=127 with a scale per output column, the input to 0..=255 with a scale and a zero
    /// point per row. A magnitude above 4.2e37 may overflow in the rotation and give NaN.
    Int8,
}

impl ComputeType {
    /// Values in a packed lane of 32 bits.
    pub(crate) fn values_per_lane(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Int8 => 4,
        }
    }
}
