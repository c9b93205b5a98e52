//! Transformations of projected heads of queries and keys in place, in one pass over memory:
//! RMS normalisation of each head, `x / √(mean(x²) + ε) · weight`, then rotary position embedding.
//! Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>; Su et al. 2021,
//! <https://arxiv.org/abs/2104.09864>.

use crate::{
    Isa,
    attention::StridedMut,
    buffer::SharedPtr,
    gemm::Element,
    norm::inverse_root,
    parallel::parallel_for,
    simd::{LANES, Microkernel, ProductKernel, RegisterTile},
};

/// Tokens per task.
const TOKENS_PER_TASK: usize = 16;

/// The RMS normalisations of the heads of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// The number of heads of queries, which are before the heads of keys.
    pub query_heads: usize,
    /// The weight of queries, `(D,)`.
    pub query: &'a [f32],
    /// The weight of keys, `(D,)`.
    pub key: &'a [f32],
    /// ε, which is added to the mean square.
    pub eps: f32,
}

/// The rotation of the pairs of values i and `i + D/2` of each token and head:
/// `xᵢ·cosᵢ − xⱼ·sinᵢ` and `xⱼ·cosᵢ + xᵢ·sinᵢ` with `j = i + D/2`.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// The cosines, `(T, D/2)` or `(B, T, D/2)`.
    pub cos: &'a [f32],
    /// The sines, as many as the cosines.
    pub sin: &'a [f32],
}

/// Normalises each head if `norms` is given, then rotates it if `rotation` is given.
///
/// # Shapes
/// `x`: `(B, H + G, T, D)`, overwritten: H heads of queries and G heads of keys. Without `norms`,
/// the number of heads is arbitrary.
///
/// # Examples
/// ```
/// use mha_kernels::{HeadNorms, Isa, Rotation, StridedMut, transform_heads_f32};
///
/// // One token with a head of queries and a head of keys: the pairs (1, 1) and (7, 7).
/// let mut x = [1., 7., 1., 7., 1., 7., 1., 7.];
/// let view = StridedMut { data: &mut x, strides: [8, 4, 8], dims: [1, 2, 1, 4] };
/// let (query, key) = (&[5.; 4], &[10.; 4]);
/// let norms = HeadNorms { query_heads: 1, query, key, eps: 0. }; // the root mean squares are 5
/// let rotation = Rotation { cos: &[1., 0.], sin: &[0., 1.] }; // by 0° and by 90°
/// transform_heads_f32(Isa::get()?, view, Some(norms), Some(rotation));
/// assert_eq!(x, [1., -7., 1., 7., 2., -14., 2., 14.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If a weight has another length than D, if D is odd and `rotation` is given, if `cos` or `sin`
/// has another shape, if the tensor reaches beyond its data, or if a stride is below the extent of
/// the axes with smaller strides, so that elements could overlap.
pub fn transform_heads_f32(
    isa: Isa,
    x: StridedMut<f32>,
    norms: Option<HeadNorms>,
    rotation: Option<Rotation>,
) {
    transform(isa, x, norms, rotation);
}

/// [`transform_heads_f32`] for bf16, as bits. Everything is computed in f32 and rounded once.
///
/// # Panics
/// As [`transform_heads_f32`].
pub fn transform_heads_bf16(
    isa: Isa,
    x: StridedMut<u16>,
    norms: Option<HeadNorms>,
    rotation: Option<Rotation>,
) {
    transform(isa, x, norms, rotation);
}

fn transform<T: Element>(
    isa: Isa,
    x: StridedMut<T>,
    norms: Option<HeadNorms>,
    rotation: Option<Rotation>,
) {
    x.check();
    let ([b, h, t, d], strides) = (x.dims, x.strides);
    if let Some(HeadNorms { query, key, .. }) = norms {
        assert!(query.len() == d && key.len() == d, "weights of norms: expected the length {d}");
    }
    let per_sequence = t * d / 2;
    let mut table_stride = 0;
    if let Some(Rotation { cos, sin }) = rotation {
        assert!(d.is_multiple_of(2), "x: expected an even width of heads, got {d}");
        assert!(
            sin.len() == cos.len() && (cos.len() == per_sequence || cos.len() == b * per_sequence),
            "cos and sin: expected (T, D/2) or (B, T, D/2)"
        );
        if cos.len() != per_sequence {
            table_stride = per_sequence;
        }
    }
    let isa = isa.without_tiles(); // no matrix products
    let data = SharedPtr::new(x.data.as_mut_ptr());
    parallel_for((b * t).div_ceil(TOKENS_PER_TASK), |task| {
        let tokens = task * TOKENS_PER_TASK..(b * t).min((task + 1) * TOKENS_PER_TASK);
        for (b, t) in tokens.map(|token| (token / t, token % t)) {
            let row = b * table_stride + t * d / 2;
            let rotation = rotation.map(|Rotation { cos, sin }| Rotation {
                cos: &cos[row..][..d / 2],
                sin: &sin[row..][..d / 2],
            });
            let start = b * strides[0] + t * strides[2];
            let token =
                Token { data, start, dims: [h, d], head_stride: strides[1], norms, rotation };
            isa.run_products(T::COMPUTE_TYPE, token);
        }
    });
}

/// The heads of one token. The first head starts at the element `start` of the data.
struct Token<'a, T> {
    data: SharedPtr<T>,
    start: usize,
    /// The number of heads, and D.
    dims: [usize; 2],
    head_stride: usize,
    norms: Option<HeadNorms<'a>>,
    /// The D/2 cosines and sines of this token.
    rotation: Option<Rotation<'a>>,
}

impl<T: Element> ProductKernel for Token<'_, T> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, M: Microkernel<V>>(self) {
        let [heads, d] = self.dims;
        for head in 0..heads {
            // SAFETY: the head is within the data, and no other token has it. The weights have D
            // elements, the cosines and sines D/2, as `transform` has checked.
            unsafe {
                let x = self.data.get().add(self.start + head * self.head_stride);
                let norm = match self.norms {
                    None => None,
                    Some(HeadNorms { query_heads, query, key, eps }) => {
                        let weight = if head < query_heads { query } else { key };
                        let scale = root_scale::<V, T>(x, d, eps);
                        Some(Norm { scale, weight: weight.as_ptr() })
                    }
                };
                match self.rotation {
                    None => scale_head::<V, M, T>(x, d, norm),
                    Some(rotation) => rotate_head::<V, M, T>(x, norm, rotation),
                }
            }
        }
    }
}

/// The normalisation of one head: the factor `1 / √(mean(x²) + ε)` in all lanes, and the weight.
#[derive(Clone, Copy)]
struct Norm<V> {
    scale: V,
    weight: *const f32,
}

/// `1 / √(mean(x²) + ε)` of `d` values.
///
/// # Safety
/// The CPU supports the instructions of `V`; `x` has `d` elements.
#[inline(always)]
unsafe fn root_scale<V: RegisterTile, T: Element>(x: *const T, d: usize, eps: f32) -> V {
    // SAFETY: upheld by the caller.
    unsafe {
        let mut squares = V::splat(0.0);
        for i in (0..d).step_by(LANES) {
            let x = T::load::<V>(x.add(i), LANES.min(d - i));
            squares = x.fma(x, squares);
        }
        inverse_root(squares, d, eps)
    }
}

/// The values `i..i + n`, normalised.
///
/// # Safety
/// The CPU supports the instructions of `V`; `x` and the weight have these elements.
#[inline(always)]
unsafe fn load<V: RegisterTile, T: Element>(
    x: *const T,
    i: usize,
    n: usize,
    norm: Option<Norm<V>>,
) -> V {
    // SAFETY: upheld by the caller.
    unsafe {
        let x = T::load::<V>(x.add(i), n);
        match norm {
            None => x,
            Some(norm) => x.mul(norm.scale).mul(V::load_partial(norm.weight.add(i), n)),
        }
    }
}

/// Normalises one head of `d` values.
///
/// # Safety
/// The CPU supports the instructions of `V` and `M`; `x` and the weight have `d` elements.
#[inline(always)]
unsafe fn scale_head<V: RegisterTile, M: Microkernel<V>, T: Element>(
    x: *mut T,
    d: usize,
    norm: Option<Norm<V>>,
) {
    for i in (0..d).step_by(LANES) {
        let n = LANES.min(d - i);
        // SAFETY: upheld by the caller.
        unsafe { T::store::<V, M>(load::<V, T>(x, i, n, norm), x.add(i), n) }
    }
}

/// Normalises and rotates one head.
///
/// # Safety
/// The CPU supports the instructions of `V` and `M`; `x` and the weight have twice as many elements
/// as there are cosines and sines.
#[inline(always)]
unsafe fn rotate_head<V: RegisterTile, M: Microkernel<V>, T: Element>(
    x: *mut T,
    norm: Option<Norm<V>>,
    Rotation { cos, sin }: Rotation,
) {
    let half = cos.len();
    for i in (0..half).step_by(LANES) {
        let n = LANES.min(half - i);
        // SAFETY: upheld by the caller.
        unsafe {
            let a = load::<V, T>(x, i, n, norm);
            let b = load::<V, T>(x, half + i, n, norm);
            let cos = V::load_partial(cos.as_ptr().add(i), n);
            let sin = V::load_partial(sin.as_ptr().add(i), n);
            T::store::<V, M>(a.mul(cos).sub(b.mul(sin)), x.add(i), n);
            T::store::<V, M>(b.mul(cos).add(a.mul(sin)), x.add(half + i), n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, from_bf16, random, to_bf16};

    const EPS: f32 = 0.01;

    /// The transformation of one head in f64, by definition.
    fn expected(x: &[f32], weight: Option<&[f32]>, rotation: Option<(&[f32], &[f32])>) -> Vec<f64> {
        let mut x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        if let Some(weight) = weight {
            let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean_square + f64::from(EPS)).sqrt();
            x.iter_mut().zip(weight).for_each(|(x, &w)| *x *= scale * f64::from(w));
        }
        if let Some((cos, sin)) = rotation {
            let half = x.len() / 2;
            for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
                let (a, b) = (x[i], x[half + i]);
                x[i] = a * f64::from(cos) - b * f64::from(sin);
                x[half + i] = b * f64::from(cos) + a * f64::from(sin);
            }
        }
        x
    }

    /// Every ISA, with strides between sequences, heads and tokens, against the definition in f64.
    ///
    /// bf16 represents the inputs. It rounds results below 2 by at most 2⁻⁸ and, with a norm, results
    /// below 8·√2 by at most 2⁻⁵.
    #[test]
    fn norms_and_rotations_match_the_definition() {
        for (d, per_sequence) in [(2, true), (6, false), (7, false), (34, true), (64, false)] {
            let [b, h, query_heads, t] = [2, 3, 2, 5];
            let token = h * d + 7; // 7 unused elements after each token
            let strides = [t * token, d, token];
            let x = from_bf16(&to_bf16(&random(b * t * token, 1)));
            let n = if per_sequence { b } else { 1 };
            let (cos, sin) = (random(n * t * (d / 2), 2), random(n * t * (d / 2), 3));
            let (query, key) = (random(d, 4), random(d, 5));
            for (has_norms, has_rotation) in [(true, false), (false, true), (true, true)] {
                if has_rotation && d % 2 == 1 {
                    continue;
                }
                let norms = has_norms.then_some(HeadNorms {
                    query_heads,
                    query: &query,
                    key: &key,
                    eps: EPS,
                });
                let rotation = has_rotation.then_some(Rotation { cos: &cos, sin: &sin });
                let mut want: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                for (b, h, t) in (0..b * h * t).map(|i| (i / t / h, i / t % h, i % t)) {
                    let at = b * strides[0] + h * strides[1] + t * strides[2];
                    let weight = if h < query_heads { &query } else { &key };
                    let row = (if per_sequence { b * 5 + t } else { t }) * (d / 2);
                    let angles = (&cos[row..][..d / 2], &sin[row..][..d / 2]);
                    let head = expected(
                        &x[at..][..d],
                        has_norms.then_some(weight),
                        has_rotation.then_some(angles),
                    );
                    want[at..][..d].copy_from_slice(&head);
                }
                for isa in Isa::available() {
                    let name = format!(
                        "{}, D = {d}, norms {has_norms}, rotation {has_rotation}",
                        isa.name()
                    );
                    let dims = [b, h, t, d];
                    let mut got = x.clone();
                    let view = StridedMut { data: &mut got, strides, dims };
                    transform_heads_f32(isa, view, norms, rotation);
                    assert_close(&format!("{name}, f32"), &got, &want, 5e-6);
                    let mut got = to_bf16(&x);
                    let view = StridedMut { data: &mut got, strides, dims };
                    transform_heads_bf16(isa, view, norms, rotation);
                    let tolerance = if has_norms { 3.2e-2 } else { 4e-3 };
                    let got = from_bf16(&got);
                    assert_close(&format!("{name}, bf16"), &got, &want, tolerance);
                }
            }
        }
    }

    /// Twenty tokens are computed in two tasks; each token alone is computed in one.
    #[test]
    fn a_token_has_the_same_bits_in_every_batch() {
        let (t, d) = (20, 34);
        let x = random(t * d, 1);
        let (weight, cos, sin) = (random(d, 2), random(t * d / 2, 3), random(t * d / 2, 4));
        let norms = HeadNorms { query_heads: 1, query: &weight, key: &weight, eps: EPS };
        for isa in Isa::available() {
            let run = |x: &[f32], angles: std::ops::Range<usize>| {
                let mut x = x.to_vec();
                let dims = [1, 1, x.len() / d, d];
                let view = StridedMut { data: &mut x, strides: [t * d, t * d, d], dims };
                let rotation = Rotation { cos: &cos[angles.clone()], sin: &sin[angles] };
                transform_heads_f32(isa, view, Some(norms), Some(rotation));
                x
            };
            let all = run(&x, 0..t * d / 2);
            for token in 0..t {
                let row = token * d..(token + 1) * d;
                let alone = run(&x[row.clone()], token * d / 2..(token + 1) * d / 2);
                assert_eq!(alone, all[row], "{}, token {token}", isa.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "weights of norms: expected the length 2")]
    fn weights_of_another_width_panic() {
        let view = StridedMut { data: &mut [0.0; 4], strides: [4, 2, 2], dims: [1, 2, 1, 2] };
        let norms = HeadNorms { query_heads: 1, query: &[1.0; 2], key: &[1.0; 3], eps: EPS };
        transform_heads_f32(Isa::SCALAR, view, Some(norms), None);
    }

    #[test]
    #[should_panic(expected = "exceed 2 elements")]
    fn strides_that_overflow_panic() {
        let strides = [usize::MAX - 999, 0, 1000];
        let view = StridedMut { data: &mut [0.0; 2], strides, dims: [2, 1, 2, 2] };
        let rotation = Rotation { cos: &[1.0; 2], sin: &[0.0; 2] };
        transform_heads_f32(Isa::SCALAR, view, None, Some(rotation));
    }

    #[test]
    #[should_panic(expected = "x: strides")]
    fn overlapping_elements_panic() {
        let view = StridedMut { data: &mut [0.0; 4], strides: [0, 0, 1], dims: [1, 1, 2, 2] };
        let rotation = Rotation { cos: &[1.0; 2], sin: &[0.0; 2] };
        transform_heads_f32(Isa::SCALAR, view, None, Some(rotation));
    }
}
