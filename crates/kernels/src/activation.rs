//! Activation functions, generic over [`Vector`].

use std::mem::MaybeUninit;

use crate::{
    isa::Isa,
    math::{exp, exp2, polynomial, sigmoid, tanh},
    parallel::parallel_chunks,
    simd::{LANES, RegisterTile, SimdKernel, Vector},
};

/// A function applied to each element of a matrix product or of a slice. NaN gives NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// The identity.
    #[default]
    None,
    /// `x·Φ(x)`, exact (erf) form. After a product in bf16 or int8, approximated with a
    /// relative error of 1.6e-4 for x ≥ −3.
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
    /// `σ(x) = 1 / (1 + e⁻ˣ)`
    Sigmoid,
}

/// The activation of each value.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, Isa, activate};
///
/// let y = activate(Isa::get()?, &[-1., 0., 50.], Activation::Tanh);
/// assert!((y[0] - -0.761_594_2).abs() < 1e-7 && y[1..] == [0., 1.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
pub fn activate(isa: Isa, x: &[f32], activation: Activation) -> Vec<f32> {
    const PART: usize = 256 * LANES;
    let mut out = Vec::with_capacity(x.len());
    parallel_chunks(&mut out.spare_capacity_mut()[..x.len()], PART, |i, out| {
        let x = &x[i * PART..][..out.len()];
        isa.run(Args { x, activation, out });
    });
    // SAFETY: every part has been written.
    unsafe { out.set_len(x.len()) };
    out
}

struct Args<'a> {
    x: &'a [f32],
    activation: Activation,
    /// As many values as `x`.
    out: &'a mut [MaybeUninit<f32>],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { x, activation, out } = self;
        let (from, to) = (x.as_ptr(), out.as_mut_ptr().cast::<f32>());
        for i in (0..x.len()).step_by(LANES) {
            let n = LANES.min(x.len() - i);
            // SAFETY: upheld by the caller; `i + n` is within both slices.
            unsafe {
                let y = activation.apply(V::load_partial(from.add(i), n), false);
                y.store_partial(to.add(i), n);
            }
        }
    }
}

impl Activation {
    /// The activation of each lane of `x`. `approximate` permits the cheaper form of GELU.
    ///
    /// # Safety
    /// The CPU supports the instructions of `V`.
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Vector>(self, x: V, approximate: bool) -> V {
        // SAFETY: upheld by the caller.
        unsafe {
            match self {
                Self::None => x,
                Self::Gelu if approximate => gelu_approximate(x),
                Self::Gelu => gelu(x),
                Self::GeluTanh => {
                    let cube = x.mul(x).mul(x);
                    let inner = cube.fma(V::splat(0.044715), x).mul(V::splat(0.797_884_6));
                    // (1 + tanh(y)) / 2 = σ(2y)
                    mul_sigmoid(x, inner.add(inner))
                }
                Self::Relu => V::splat(0.0).max(x), // `max` returns its argument if that is NaN
                Self::Silu => mul_sigmoid(x, x),
                Self::Tanh => tanh(x),
                Self::QuickGelu => mul_sigmoid(x, x.mul(V::splat(1.702))),
                Self::Mish => {
                    let e = exp(x.min(V::splat(20.0)));
                    let n = e.mul(e.add(V::splat(2.0)));
                    x.mul(n.div(n.add(V::splat(2.0))))
                }
                Self::Sigmoid => sigmoid(x),
            }
        }
    }
}

/// `x·σ(y)`. Wherever x < −10⁴, y must be at most −100.
///
/// For such a y, σ(y) is below 4e-44, but [`sigmoid`] returns at least 6e-39. To keep the product
/// negligible, at most 6e-35 in magnitude, x is clamped to −10⁴ from below.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn mul_sigmoid<V: Vector>(x: V, y: V) -> V {
    // SAFETY: upheld by the caller.
    unsafe { V::splat(-1e4).max(x).mul(sigmoid(y)) } // `max` returns its argument if that is NaN
}

/// `x·Φ(x)`, where `Φ(x) = (1 + erf(x/√2)) / 2`.
///
/// Computed as `max(0, x) + m·Φ(m)` with `m = −|x|` and `Φ(m) = 2^(m·q(m) − 1)`, where q is a
/// polynomial. The error is at most 1.5e-7, absolute if the result is at most 1, otherwise
/// relative. For x ≥ −3 the relative error is at most 2.5e-6, and for x ≥ −6.36 at most 6e-3. For
/// x < −6.36, where `1 + erf` in f32 has no correct digits, the absolute error is at most 1e-9.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn gelu<V: Vector>(x: V) -> V {
    const MIN_Q: f32 = -6.364; // Φ is below 1e-10 here; q is constant for smaller m
    const MIN: f32 = -40.0; // m·Φ(m) is 0 here
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
    // SAFETY: upheld by the caller.
    unsafe {
        let m = x.min(V::splat(0.0).sub(x)).max(V::splat(MIN));
        let q = polynomial(m.max(V::splat(MIN_Q)), Q);
        let tail = exp2(m.fma(q, V::splat(-1.0)));
        m.fma(tail, V::splat(0.0).max(x)) // `max` returns its argument if that is NaN
    }
}

/// [`gelu`] in half the operations: relative error 1.6e-4 for x ≥ −3, absolute error 1e-6 below.
/// For products whose operands are rounded to bf16 or int8.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn gelu_approximate<V: Vector>(x: V) -> V {
    const MIN: f32 = -5.5; // m·Φ(m) is −1e-7 here, and constant for smaller m
    const Q: [f32; 5] = [1.151_000_4, -0.459_596_3, 0.052_146_2, 0.007_198_555_5, 0.000_488_079_8];
    const P: [f32; 4] = [0.999_928_1, 0.693_261, 0.242_611_12, 0.055_171_67];
    // SAFETY: upheld by the caller.
    unsafe {
        let m = x.min(V::splat(0.0).sub(x)).max(V::splat(MIN));
        let y = m.fma(polynomial(m, Q), V::splat(-1.0));
        let n = y.round();
        let tail = polynomial(y.sub(n), P).mul(n.exp2_int());
        m.fma(tail, V::splat(0.0).max(x)) // `max` returns its argument if that is NaN
    }
}
