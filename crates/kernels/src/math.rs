//! `exp` and the activations, over vectors of any width.

use crate::lanes::Lanes;

/// What is applied to each element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `x·Φ(x)`, through erf.
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
    /// # Safety
    /// The instructions of `L`.
    #[inline(always)]
    pub(crate) unsafe fn apply<L: Lanes>(self, x: L) -> L {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::None => x,
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

/// `eˣ`; 0 below −87, where it is less than 1.7e-38, and for −∞; NaN for NaN.
///
/// `eˣ = 2ⁿ·eʳ` with `|r| ≤ ln 2 / 2`, and `eʳ = 1 + r + r²·p(r)`, p fitted to the least relative
/// error. Error: 1 ulp.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn exp<L: Lanes>(x: L) -> L {
    const LN_2_HIGH: f32 = std::f32::consts::LN_2;
    const LN_2_LOW: f32 = -1.904_654_2e-9; // ln 2 − LN_2_HIGH
    const P: [f32; 6] =
        [0.5, 0.166_666_67, 0.041_666_295, 0.008_333_497, 0.001_394_466, 0.000_197_903_46];
    // SAFETY: the caller's.
    unsafe {
        let bounded = L::splat(88.0).min(L::splat(-87.0).max(x)); // NaN stays NaN
        let n = bounded.mul(L::splat(std::f32::consts::LOG2_E)).round();
        let r = n.fma(L::splat(-LN_2_HIGH), bounded);
        let r = n.fma(L::splat(-LN_2_LOW), r);
        let e = polynomial(r, P).mul(r).fma(r, r).add(L::splat(1.0));
        let e = e.mul(n.exp2_of_integer());
        x.add(L::splat(87.0)).if_negative(L::splat(0.0), e)
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

/// `x·Φ(x)`, Φ the distribution function of the normal distribution: `(1 + erf(x/√2)) / 2`.
///
/// With `t = |x|/√2`, `Φ(−|x|) = erfc(t)/2 = exp(−t² + l(t))/2`, where `l(t) = ln(eᵗ²·erfc(t))` is
/// a polynomial, fitted to the least error of erfc. The negative side so keeps its relative
/// precision, which `1 + erf` would lose.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn gelu<L: Lanes>(x: L) -> L {
    const FAR: f32 = 4.5; // beyond, erfc is below 2e-10
    const L_OVER_T: [f32; 9] = [
        -1.128_379_6,
        0.363_388_5,
        -0.102_830_06,
        0.019_313_235,
        -0.000_100_749_83,
        -0.001_427_748_4,
        0.000_509_848_76,
        -0.000_084_698_8,
        0.000_005_693_188,
    ];
    // SAFETY: the caller's.
    unsafe {
        let size = x.max(L::splat(0.0).sub(x));
        let t = size.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2)).min(L::splat(FAR));
        let l = polynomial(t, L_OVER_T).mul(t);
        let half = L::splat(0.5);
        let tail = exp(x.mul(x).fma(L::splat(-0.5), l)).mul(half);
        x.mul(x.if_negative(tail, L::splat(1.0).sub(tail)))
    }
}
