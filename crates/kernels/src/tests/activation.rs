//! Activations against their definitions in f64.

use crate::{
    testing::{ACTIVATIONS, COMPUTE_TYPES},
    *,
};

fn gelu(x: f64) -> f64 {
    0.5 * x * libm::erfc(-x / std::f64::consts::SQRT_2)
}

/// Checks [−12, 12] in steps of 1/8192, and some values of smaller and larger magnitude.
#[test]
#[cfg_attr(miri, ignore = "takes hours in Miri")]
fn activations_match_f64() {
    let mut x: Vec<f32> = (-98_304..=98_304).map(|i| i as f32 / 8192.0).collect();
    x.extend([-3e38, -1e30, -100., -87.5, -20., 20., 87.5, 100., 1e30, 3e38, 1e-30, -1e-30]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu_tanh = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    let mish = |x: f64| x * x.exp().ln_1p().tanh();
    type Definition<'a> = (Activation, &'a dyn Fn(f64) -> f64, f64); // with the tolerance
    let definitions: [Definition; 8] = [
        (Activation::Gelu, &gelu, 1.5e-7),
        (Activation::GeluTanh, &gelu_tanh, 5e-7), // the argument of tanh is itself rounded
        (Activation::Relu, &|x| x.max(0.0), 0.0),
        (Activation::Silu, &|x| x * sigmoid(x), 2.5e-7),
        (Activation::Tanh, &f64::tanh, 2.5e-7),
        (Activation::QuickGelu, &|x| x * sigmoid(1.702 * x), 5e-7),
        (Activation::Mish, &|x| if x > 100.0 { x } else { mish(x) }, 3.5e-7),
        (Activation::Sigmoid, &sigmoid, 1.5e-7),
    ];
    for (activation, definition, tolerance) in definitions {
        for isa in Isa::available() {
            let got = activate(isa, &x, activation);
            let mut worst = (0.0, 0.0);
            for (&x, &got) in x.iter().zip(&got) {
                let expected = definition(f64::from(x));
                // The error is relative where the expected value exceeds 1.
                let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
                if error > worst.0 || error.is_nan() {
                    worst = (error, x);
                }
            }
            println!("{activation:?} on {}: error {:.1e} at {}", isa.name(), worst.0, worst.1);
            assert!(worst.0 <= tolerance, "{activation:?} on {}: {worst:?}", isa.name());
        }
    }
}

/// The precision that the documentation of the kernel's GELU states for negative x.
#[test]
#[cfg_attr(miri, ignore = "takes hours in Miri")]
fn gelu_keeps_relative_precision_for_negative_x() {
    let x: Vec<f32> = (1..=98_304).map(|i| i as f32 / -8192.0).collect();
    for isa in Isa::available() {
        let mut worst = [0.0f64; 2];
        for (&x, got) in x.iter().zip(activate(isa, &x, Activation::Gelu)) {
            let expected = gelu(f64::from(x));
            let error = (f64::from(got) - expected).abs();
            assert!(!error.is_nan(), "GELU({x}) on {} is NaN", isa.name()); // `max` discards NaN
            match x {
                x if x >= -3.0 => worst[0] = worst[0].max(error / expected.abs()),
                x if x >= -6.36 => worst[1] = worst[1].max(error / expected.abs()),
                _ => assert!(error <= 1e-9, "GELU({x}) on {}: error {error:e}", isa.name()),
            }
        }
        println!(
            "{}: relative error {:.1e} for x ≥ −3, {:.1e} below",
            isa.name(),
            worst[0],
            worst[1]
        );
        assert!(worst[0] <= 2.5e-6 && worst[1] <= 6e-3, "{}: {worst:?}", isa.name());
    }
}

/// Products of bf16 use the approximate GELU. Checks zero and every normal bf16 of magnitude
/// below 100, and ±2¹⁰⁰.
#[test]
#[cfg_attr(miri, ignore = "takes hours in Miri")]
fn approximate_gelu_matches_f64_within_tolerance() {
    let bits = (0..0x42c8u32).flat_map(|bits| [bits << 16, bits << 16 | 1 << 31]);
    let mut x: Vec<f32> = bits.map(f32::from_bits).filter(|x| *x == 0.0 || x.is_normal()).collect();
    x.extend([1.0, -1.0].map(|x: f32| x * 2f32.powi(100)));
    for isa in Isa::available() {
        let one = PackedLinear::pack(isa, ComputeType::Bf16, &[1.0], 1, 1, None);
        let got = linear(isa, &x, &[&one], Activation::Gelu);
        for (&x, &got) in x.iter().zip(&got) {
            let expected = gelu(f64::from(x));
            let error = (f64::from(got) - expected).abs();
            let allowed = if x < -3.0 { 1e-6 } else { 1.6e-4 * expected.abs() };
            assert!(
                error <= allowed,
                "GELU({x}) on {}: got {got}, expected {expected}",
                isa.name()
            );
        }
    }
}

#[test]
fn activations_propagate_nan() {
    for isa in Isa::available() {
        for activation in ACTIVATIONS {
            let got = activate(isa, &[1.0, f32::NAN], activation);
            assert!(got[0] > 0.0 && got[1].is_nan(), "{activation:?} on {}: {got:?}", isa.name());
        }
        for compute_type in COMPUTE_TYPES {
            let one = PackedLinear::pack(isa, compute_type, &[1.0], 1, 1, None);
            let got = linear(isa, &[1.0, f32::NAN], &[&one], Activation::Gelu);
            let name = isa.name();
            assert!(got[0] > 0.8 && got[1].is_nan(), "GELU in {compute_type:?} on {name}: {got:?}");
        }
    }
}
