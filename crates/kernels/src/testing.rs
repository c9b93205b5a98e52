//! Helpers of the tests, which compare every ISA of this machine with definitions in f64.

use crate::{activation::Activation, compute_type::ComputeType, simd::bf16_bits};

pub(crate) const ACTIVATIONS: [Activation; 9] = [
    Activation::None,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Relu,
    Activation::Silu,
    Activation::Tanh,
    Activation::QuickGelu,
    Activation::Mish,
    Activation::Sigmoid,
];

pub(crate) const COMPUTE_TYPES: [ComputeType; 3] =
    [ComputeType::F32, ComputeType::Bf16, ComputeType::Int8];

/// Returns `usual`, but `in_miri` in Miri, which runs only about a thousand multiply-adds per
/// second.
pub(crate) const fn scaled(usual: usize, in_miri: usize) -> usize {
    if cfg!(miri) { in_miri } else { usual }
}

/// Pseudo-random values in −1..1.
pub(crate) fn random(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The values rounded to bf16, as bits.
pub(crate) fn to_bf16(x: &[f32]) -> Vec<u16> {
    x.iter().map(|&x| bf16_bits(x)).collect()
}

/// The values of bf16 bits.
pub(crate) fn from_bf16(x: &[u16]) -> Vec<f32> {
    x.iter().map(|&x| f32::from_bits(u32::from(x) << 16)).collect()
}

/// Asserts that no element differs by more than `tolerance`.
#[track_caller]
pub(crate) fn assert_close(name: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}: the lengths differ");
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(got) - expected).abs();
        assert!(
            difference <= tolerance,
            "{name}, element {i}: got {got}, expected {expected}, difference {difference:.1e}"
        );
    }
}
