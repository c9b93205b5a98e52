//! `exp` and the activations, over vectors of any width.

use std::f32::consts::{LN_2, LOG2_E};

use crate::lanes::Lanes;

/// What is applied to each element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `x·Φ(x)`, through erf; of products of bf16 and int8, to a relative error of 1.6e-4.
    Gelu,
    /// `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`
    GeluTanh,
    /// `max(0, x)`
    Relu,
    /// `x·σ(x)`
    Silu,
    /// `tanh(x)`
    Tanh,
    /// `x·σ(1.702·x)`
    QuickGelu,
    /// `x·tanh(ln(1 + eˣ))`
    Mish,
}

impl Activation {
    /// To fewer bits, where there is a shorter way, if that is `near` enough.
    ///
    /// # Safety
    /// The instructions of `L`.
    #[inline(always)]
    pub(crate) unsafe fn apply<L: Lanes>(self, x: L, near: bool) -> L {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::None => x,
                Self::Gelu if near => gelu_near(x),
                Self::Gelu => gelu(x),
                Self::GeluTanh => {
                    let cube = x.mul(x).mul(x);
                    let inner = cube.fma(L::splat(0.044715), x).mul(L::splat(0.797_884_6));
                    // (1 + tanh(y)) / 2 = σ(2y)
                    x.mul(sigmoid(inner.add(inner)))
                }
                Self::Relu => L::splat(0.0).max(x), // NaN stays NaN
                Self::Silu => x.mul(sigmoid(x)),
                Self::Tanh => tanh(x),
                Self::QuickGelu => x.mul(sigmoid(x.mul(L::splat(1.702)))),
                Self::Mish => {
                    let e = exp(x.min(L::splat(20.0)));
                    let n = e.mul(e.add(L::splat(2.0)));
                    x.mul(n.div(n.add(L::splat(2.0))))
                }
            }
        }
    }
}

/// Horner's scheme, the constant first.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn polynomial<L: Lanes, const D: usize>(x: L, coefficients: [f32; D]) -> L {
    // SAFETY: the caller's.
    unsafe {
        let mut y = L::splat(coefficients[D - 1]);
        for &c in coefficients[..D - 1].iter().rev() {
            y = y.fma(x, L::splat(c));
        }
        y
    }
}

/// `2ⁿ⁺ʳ` for an integer n and `|r| ≤ 1/2`: `2ʳ = 1 + r·p(r)`, p fitted to the least relative error,
/// 2.0e-9.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn exp2_of_parts<L: Lanes>(n: L, r: L) -> L {
    const P: [f32; 7] =
        [1.0, LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_62];
    // SAFETY: the caller's.
    unsafe { polynomial(r, P).times_exp2(n) }
}

/// `2ˣ` for x below 128; 0 for −∞; NaN for NaN. Error: 1 ulp of what the rounded x stands for.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn exp2<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let x = L::splat(-200.0).max(x); // NaN stays NaN
        let n = x.round();
        exp2_of_parts(n, x.sub(n))
    }
}

/// `eˣ`, that of 88 beyond; 0 for −∞; NaN for NaN. Error: 1 ulp.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn exp<L: Lanes>(x: L) -> L {
    const LOG2_E_LOW: f32 = 1.925_963e-8; // log₂ e − LOG2_E
    // SAFETY: the caller's.
    unsafe {
        let x = L::splat(88.0).min(L::splat(-105.0).max(x)); // NaN stays NaN
        let log2_e = L::splat(LOG2_E);
        let n = x.mul(log2_e).round();
        let r = x.fma(log2_e, L::splat(0.0).sub(n));
        exp2_of_parts(n, x.fma(L::splat(LOG2_E_LOW), r))
    }
}

/// `1 / (1 + e⁻ˣ)`
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let one = L::splat(1.0);
        one.div(one.add(exp(L::splat(0.0).sub(x))))
    }
}

/// `sign(x)·(1 − e⁻²ˡˣˡ) / (1 + e⁻²ˡˣˡ)`; below 0.1, where that would cancel, its series.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn tanh<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's.
    unsafe {
        let (zero, one) = (L::splat(0.0), L::splat(1.0));
        let size = x.max(zero.sub(x));
        let e = exp(size.mul(L::splat(-2.0)));
        let far = one.sub(e).div(one.add(e));
        let far = x.if_negative(zero.sub(far), far);
        let square = x.mul(x);
        let series = polynomial(square, [1.0, -1.0 / 3.0, 2.0 / 15.0, -17.0 / 315.0]).mul(x);
        size.sub(L::splat(0.1)).if_negative(series, far)
    }
}

/// [`gelu`] in half the operations, beside factors of 16 bits and fewer: relative error 1.6e-4 for x
/// from −3 on, absolute error 1e-6 before.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn gelu_near<L: Lanes>(x: L) -> L {
    const FAR: f32 = -5.5; // where m·Φ(m) is −1e-7, and stays
    const Q: [f32; 5] = [1.151_000_4, -0.459_596_3, 0.052_146_2, 0.007_198_555_5, 0.000_488_079_8];
    const P: [f32; 4] = [0.999_928_1, 0.693_261, 0.242_611_12, 0.055_171_67];
    // SAFETY: the caller's.
    unsafe {
        let m = x.min(L::splat(0.0).sub(x)).max(L::splat(FAR));
        let y = m.fma(polynomial(m, Q), L::splat(-1.0));
        let n = y.round();
        let tail = polynomial(y.sub(n), P).mul(n.exp2_of_integer());
        m.fma(tail, L::splat(0.0).max(x)) // NaN stays NaN
    }
}

/// `x·Φ(x)`, Φ the distribution function of the normal distribution, `(1 + erf(x/√2)) / 2`; it is
/// `max(0, x) − |x|·Φ(−|x|)`, and with `m = −|x|`, `Φ(m) = 2^(m·q(m) − 1)`.
///
/// q is fitted to the least error of erfc; so the negative side keeps its relative precision, which
/// `1 + erf` would lose.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn gelu<L: Lanes>(x: L) -> L {
    const FAR: f32 = -6.364; // before, Φ is below 1e-10: q stays as it is there
    const NOTHING: f32 = -40.0; // and there m·Φ(m) is 0, with that q too
    const Q: [f32; 9] = [
        1.151_104_6,
        -0.459_218_1,
        0.052_450_5,
        0.006_965_777,
        0.000_025_694_719,
        -0.000_257_475_68,
        -0.000_065_014_6,
        -0.000_007_637_159,
        -0.000_000_362_990_4,
    ];
    // SAFETY: the caller's.
    unsafe {
        let m = x.min(L::splat(0.0).sub(x)).max(L::splat(NOTHING));
        let q = polynomial(m.max(L::splat(FAR)), Q);
        let tail = exp2(m.fma(q, L::splat(-1.0)));
        m.fma(tail, L::splat(0.0).max(x)) // NaN stays NaN
    }
}
