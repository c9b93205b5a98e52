//! `exp`, `tanh` and the logistic function, generic over [`Vector`].

use std::f32::consts::{LN_2, LOG2_E};

use crate::simd::Vector;

/// `Σ coefficients[i]·xⁱ` by Horner's scheme.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn polynomial<V: Vector, const D: usize>(x: V, coefficients: [f32; D]) -> V {
    // SAFETY: upheld by the caller.
    unsafe { polynomials([x], coefficients)[0] }
}

/// [`polynomial`] of each vector. Each step is computed for all vectors before the next, because a
/// step has to wait for the one before it.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn polynomials<V: Vector, const N: usize, const D: usize>(
    x: [V; N],
    coefficients: [f32; D],
) -> [V; N] {
    // SAFETY: upheld by the caller.
    unsafe {
        let mut y = [V::splat(coefficients[D - 1]); N];
        for &c in coefficients[..D - 1].iter().rev() {
            for i in 0..N {
                y[i] = y[i].fma(x[i], V::splat(c));
            }
        }
        y
    }
}

/// The polynomial in r of `2ʳ` for `|r| ≤ 1/2`. Without the rounding errors of its evaluation, it
/// has a maximum relative error of 1.6e-8.
const EXP2: [f32; 7] =
    [1.0, LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_62];

/// `2ⁿ⁺ʳ` for an integer n and `|r| ≤ 1/2`.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn exp2_of_parts<V: Vector>(n: V, r: V) -> V {
    // SAFETY: upheld by the caller.
    unsafe { polynomial(r, EXP2).mul_exp2(n) }
}

/// `2ˣ` for x < 127.5; 0 for x < −126.5. NaN gives NaN. Error: 1 ulp.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2<V: Vector>(x: V) -> V {
    // SAFETY: upheld by the caller.
    unsafe { exp2_each([x])[0] }
}

/// [`exp2`] of each vector, as for [`polynomials`].
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2_each<V: Vector, const N: usize>(mut x: [V; N]) -> [V; N] {
    let mut n = x;
    // SAFETY: upheld by the caller.
    unsafe {
        for i in 0..N {
            x[i] = V::splat(-127.0).max(x[i]); // `max` returns its argument if that is NaN
            n[i] = x[i].round();
            x[i] = x[i].sub(n[i]);
        }
        let mut y = polynomials(x, EXP2);
        for i in 0..N {
            y[i] = y[i].mul(n[i].exp2_int());
        }
        y
    }
}

/// `eˣ`. x is clamped to −105..88; −∞ gives 0, NaN gives NaN. Error: at most 1.2 ulp.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp<V: Vector>(x: V) -> V {
    const LOG2_E_LOW: f32 = 1.925_963e-8; // log₂ e − LOG2_E
    // SAFETY: upheld by the caller.
    unsafe {
        // `min` and `max` return their argument if that is NaN.
        let x = V::splat(88.0).min(V::splat(-105.0).max(x));
        let log2_e = V::splat(LOG2_E);
        let n = x.mul(log2_e).round();
        let r = x.fma(log2_e, V::splat(0.0).sub(n));
        exp2_of_parts(n, x.fma(V::splat(LOG2_E_LOW), r))
    }
}

/// The logistic function, `1 / (1 + e⁻ˣ)`.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: upheld by the caller.
    unsafe {
        let one = V::splat(1.0);
        one.div(one.add(exp(V::splat(0.0).sub(x))))
    }
}

/// `tanh(x) = sign(x)·(1 − e) / (1 + e)` with `e = exp(−2·|x|)`. For |x| < 0.1, the Taylor series
/// is used, because `1 − e` would lose precision by cancellation.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: Vector>(x: V) -> V {
    // SAFETY: upheld by the caller.
    unsafe {
        let (zero, one) = (V::splat(0.0), V::splat(1.0));
        let abs = x.max(zero.sub(x));
        let e = exp(abs.mul(V::splat(-2.0)));
        let quotient = one.sub(e).div(one.add(e));
        let quotient = x.select_negative(zero.sub(quotient), quotient);
        let square = x.mul(x);
        let series = polynomial(square, [1.0, -1.0 / 3.0, 2.0 / 15.0, -17.0 / 315.0]).mul(x);
        abs.sub(V::splat(0.1)).select_negative(series, quotient)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::ScalarVector;

    /// Checks the error over [−87, 88] in steps of 1/2048. The SIMD paths run the same operations,
    /// except that AVX-512 multiplies by 2ⁿ with one instruction.
    #[test]
    #[cfg_attr(miri, ignore = "takes hours in Miri")]
    fn the_error_of_exp_is_at_most_1_2_ulp() {
        let mut worst = (0.0f64, 0.0);
        for i in -178_176..=180_224 {
            let x = i as f32 / 2048.0;
            // SAFETY: the scalar vector needs no special instructions.
            let got = unsafe { exp(ScalarVector::splat(x)).first() };
            let expected = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * expected.log2().floor().exp2();
            let error = (f64::from(got) - expected).abs() / ulp;
            if error > worst.0 || error.is_nan() {
                worst = (error, x);
            }
        }
        println!("exp: {:.3} ulp at {}", worst.0, worst.1);
        assert!(worst.0 > 0.5 && worst.0 <= 1.2, "{worst:?}");
    }
}
