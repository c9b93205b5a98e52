//! Rotary position embedding in place: Su et al. 2021, <https://arxiv.org/abs/2104.09864>.

use crate::{
    Isa,
    attention::StridedMut,
    buffer::SharedPtr,
    gemm::{Element, Kernel, Microkernel, RegisterTile, dispatch},
    parallel::parallel_for,
};

/// Tokens per task.
const TOKENS_PER_TASK: usize = 16;

/// Rotates the pairs of values i and `i + D/2` of each token and head:
/// `xᵢ·cosᵢ − xⱼ·sinᵢ` and `xⱼ·cosᵢ + xᵢ·sinᵢ` with `j = i + D/2`.
///
/// # Shapes
/// - `x`: `(B, H, T, D)`, overwritten
/// - `cos`, `sin`: `(T, D/2)`, or `(B, T, D/2)`
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, StridedMut, rotate_f32};
///
/// let mut x = [1., 2., 3., 4.]; // one token: the pairs (1, 3) and (2, 4)
/// let view = StridedMut { data: &mut x, strides: [4, 4, 4], dims: [1, 1, 1, 4] };
/// rotate_f32(Isa::get()?, view, &[1., 0.], &[0., 1.]); // by 0° and by 90°
/// assert_eq!(x, [1., -4., 3., 2.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If D is odd, if `cos` or `sin` has another shape, if the tensor reaches beyond its data, or if a
/// stride is below the extent of the axes with smaller strides, so that elements could overlap.
pub fn rotate_f32(isa: Isa, x: StridedMut<f32>, cos: &[f32], sin: &[f32]) {
    rotate(isa, x, cos, sin);
}

/// [`rotate_f32`] for bf16, as bits. The rotation is computed in f32.
///
/// # Panics
/// As [`rotate_f32`].
pub fn rotate_bf16(isa: Isa, x: StridedMut<u16>, cos: &[f32], sin: &[f32]) {
    rotate(isa, x, cos, sin);
}

fn rotate<T: Element>(isa: Isa, x: StridedMut<T>, cos: &[f32], sin: &[f32]) {
    x.check();
    let ([b, h, t, d], strides) = (x.dims, x.strides);
    assert!(d.is_multiple_of(2), "x: expected an even width of heads, got {d}");
    let (per_sequence, len) = (t * d / 2, cos.len());
    assert!(
        sin.len() == len && (len == per_sequence || len == b * per_sequence),
        "cos and sin: expected (T, D/2) or (B, T, D/2)"
    );
    let table_stride = if len == per_sequence { 0 } else { per_sequence };
    let isa = isa.min(Isa::AVX512_BF16_VNNI); // no matrix products, so no AMX
    let data = SharedPtr::new(x.data.as_mut_ptr());
    parallel_for((b * t).div_ceil(TOKENS_PER_TASK), |task| {
        let tokens = task * TOKENS_PER_TASK..(b * t).min((task + 1) * TOKENS_PER_TASK);
        for (b, t) in tokens.map(|token| (token / t, token % t)) {
            let row = b * table_stride + t * d / 2;
            let (cos, sin) = (&cos[row..][..d / 2], &sin[row..][..d / 2]);
            let start = b * strides[0] + t * strides[2];
            let token = Token { data, start, heads: h, head_stride: strides[1], cos, sin };
            dispatch(isa, T::COMPUTE_TYPE, token);
        }
    });
}

/// The heads of one token, D values each. The first head starts at the element `start` of the data.
struct Token<'a, T> {
    data: SharedPtr<T>,
    start: usize,
    heads: usize,
    head_stride: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<T: Element> Kernel for Token<'_, T> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self) {
        let half = self.cos.len();
        for head in 0..self.heads {
            for i in (0..half).step_by(V::LANES) {
                let n = V::LANES.min(half - i);
                // SAFETY: the elements are within the data, and no other token has them.
                unsafe {
                    let first = self.data.get().add(self.start + head * self.head_stride + i);
                    let second = first.add(half);
                    let (a, b) = (T::load::<V>(first, n), T::load::<V>(second, n));
                    let cos = V::load_partial(self.cos.as_ptr().add(i), n);
                    let sin = V::load_partial(self.sin.as_ptr().add(i), n);
                    T::store::<V, D>(a.mul(cos).sub(b.mul(sin)), first, n);
                    T::store::<V, D>(b.mul(cos).add(a.mul(sin)), second, n);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, from_bf16, random, to_bf16};

    /// Every ISA, with strides between sequences, heads and tokens, against the definition in f64.
    /// Inputs are below 1 and results below 2, so bf16 rounds each of two inputs by at most 2⁻⁹ and
    /// each result by at most 2⁻⁸: 7.8e-3 together.
    #[test]
    fn rotations_match_the_definition() {
        for (d, per_sequence) in [(2, true), (6, false), (34, true), (64, false)] {
            let [b, h, t] = [2, 3, 5];
            let token = h * d + 7; // 7 unused elements after each token
            let strides = [t * token, d, token];
            let x = random(b * t * token, 1);
            let n = if per_sequence { b } else { 1 };
            let (cos, sin) = (random(n * t * d / 2, 2), random(n * t * d / 2, 3));
            let mut expected: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            for (b, h, t, i) in (0..b * h * t * (d / 2)).map(|j| {
                let (row, i) = (j / (d / 2), j % (d / 2));
                (row / t / h, row / t % h, row % t, i)
            }) {
                let at = b * strides[0] + h * strides[1] + t * strides[2] + i;
                let row = if per_sequence { b * 5 + t } else { t };
                let angle = row * d / 2 + i;
                let (cos, sin) = (f64::from(cos[angle]), f64::from(sin[angle]));
                let (first, second) = (f64::from(x[at]), f64::from(x[at + d / 2]));
                expected[at] = first * cos - second * sin;
                expected[at + d / 2] = second * cos + first * sin;
            }
            for isa in Isa::available() {
                let mut got = x.clone();
                let dims = [b, h, t, d];
                rotate_f32(isa, StridedMut { data: &mut got, strides, dims }, &cos, &sin);
                assert_close(&format!("{} f32, D = {d}", isa.name()), &got, &expected, 1e-6);
                let mut got = to_bf16(&x);
                rotate_bf16(isa, StridedMut { data: &mut got, strides, dims }, &cos, &sin);
                let name = format!("{} bf16, D = {d}", isa.name());
                assert_close(&name, &from_bf16(&got), &expected, 7.9e-3);
            }
        }
    }

    #[test]
    #[should_panic(expected = "exceed 2 elements")]
    fn strides_that_overflow_panic() {
        let strides = [usize::MAX - 999, 0, 1000];
        let view = StridedMut { data: &mut [0.0; 2], strides, dims: [2, 1, 2, 2] };
        rotate_f32(Isa::SCALAR, view, &[1.0; 2], &[0.0; 2]);
    }

    #[test]
    #[should_panic(expected = "x: strides")]
    fn overlapping_elements_panic() {
        let view = StridedMut { data: &mut [0.0; 4], strides: [0, 0, 1], dims: [1, 1, 2, 2] };
        rotate_f32(Isa::SCALAR, view, &[1.0; 2], &[0.0; 2]);
    }
}
