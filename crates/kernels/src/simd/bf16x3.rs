//! f32 matrix products on bf16 units (BF16x3).
//!
//! AMX does not multiply f32, so each f32 value x is split into three bf16 terms with
//! x = x₀ + x₁ + x₂: x₀ = bf16(x), x₁ = bf16(x − x₀), x₂ = x − x₀ − x₁. Of the nine partial
//! products of two values, the six largest are summed; the other three add up to less than 2⁻²⁴ of
//! the product of the two values, which is the rounding error of f32.
//!
//! # Layout
//! Values are stored in blocks of [`BLOCK`] along k: all x₀ of the block, then all x₁, then all x₂.
//! If x₂ is 0 in the whole weight, as for a checkpoint in f16, the weight is stored and multiplied
//! with two terms per value. The result is the same.
//!
//! # Limits
//! - Inputs and weights with a magnitude above 3.396e38, and infinities, give NaN: they overflow
//!   bf16.
//! - bf16 units flush operands and sums below 2⁻¹²⁶ to zero. A term or a partial product that is
//!   not zero can be as small as about 2⁻²⁴ times the value or the product that it belongs to, so
//!   values and products below 2⁻¹⁰² lose bits.

/// Packed lanes per term of a block. A lane contains one term of each of two adjacent values.
pub(crate) const TERM_LANES: usize = 16;
/// Values of a block along k. Ranges of k that are multiplied separately are whole blocks.
pub(crate) const BLOCK: usize = 2 * TERM_LANES;

/// Blocks that `k` values take; the last is padded with zeros.
pub(crate) const fn blocks(k: usize) -> usize {
    k.div_ceil(BLOCK)
}

/// Packed lanes that `k` values take with three terms each.
pub(crate) const fn lanes(k: usize) -> usize {
    lanes_per_block(3) * blocks(k)
}

/// Packed lanes of a block with this number of terms per value.
pub(crate) const fn lanes_per_block(terms: usize) -> usize {
    terms * TERM_LANES
}

/// The number of terms that represent every value of a weight exactly: two if all significands have
/// at most 16 bits, else three.
pub(crate) fn terms_needed(weight: &[f32]) -> usize {
    if weight.iter().fold(0, |bits, w| bits | w.to_bits()) & 0xff == 0 { 2 } else { 3 }
}

/// The sum of the terms of value `k` of a packed row or column. `lane(i)` reads its packed lane i.
pub(crate) fn join(terms: usize, k: usize, lane: impl Fn(usize) -> f32) -> f32 {
    let term = |term| {
        let lane = lane((k / BLOCK * terms + term) * TERM_LANES + k % BLOCK / 2);
        f32::from_bits(lane.to_bits() >> (16 * (k % 2)) << 16)
    };
    match (1..terms).rev().map(term).sum::<f32>() {
        0.0 => term(0), // keeps the sign of −0
        rest => term(0) + rest,
    }
}
