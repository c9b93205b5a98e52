//! Rotary position embedding: queries and keys are rotated by angles proportional to their
//! positions, so that scores depend on the distance of the tokens.
//! Su et al. 2021, <https://arxiv.org/abs/2104.09864>.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{D, Device, Tensor};
use candle_nn::rotary_emb::rope;
use ops::{QueryRange, rotate_in_place, table_fits};

use crate::{
    AttentionMask, Error, HeadNorms, QueryKeyTransform, Result, RotaryScaling,
    head_norms::queries_and_keys,
    shape::{check_heads, expect_rank, shape_error},
};

/// The maximum number of positions: f32 represents every integer up to this one.
const MAX_POSITIONS: usize = 1 << 24;

/// The number of positions of the first tables, to avoid several small ones.
const FIRST_POSITIONS: usize = 256;

/// The cosines and sines of positions. The values `i` and `i + D/2` of a token at position p are
/// rotated as a pair, by the angle p times frequency i. Frequency i is `theta^(−2i/D)` unless a
/// [`RotaryScaling`] changes it.
///
/// A table is computed when it is first needed, up to a power of two of positions, and grows when
/// later positions need it. Its rows have the same bits whenever they are computed. Clones share
/// it.
///
/// # Numerics
/// Angles are computed in f32, rotations in f32 or, for f64 inputs, in f64.
///
/// # Examples
/// The score of two tokens depends on their distance only:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{QueryKeyTransform, Rotary};
///
/// let rotary = Rotary::new(10_000., 4, 100, &Cpu)?; // theta, D, positions
/// let x = Tensor::new(&[[[[1f32, 2., 3., 4.], [5., 6., 7., 8.]]]], &Cpu)?; // (1, 1, 2, 4)
/// let score = |positions: [u32; 2]| -> mha::Result<f32> {
///     let rotated = rotary.at(&positions)?.query(&x)?.squeeze(0)?.squeeze(0)?;
///     Ok((rotated.get(0)? * rotated.get(1)?)?.sum_all()?.to_scalar()?)
/// };
/// assert!((score([0, 3])? - score([90, 93])?).abs() < 1e-4);
/// assert!((score([0, 0])? - 70.).abs() < 1e-4); // 1·5 + 2·6 + 3·7 + 4·8
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// Su et al. 2021, equation 34, in the layout of GPT-NeoX: `rotate_half` of transformers.
#[derive(Clone, Debug)]
pub struct Rotary {
    theta: f64,
    scaling: RotaryScaling,
    d: usize,
    positions: usize,
    device: Device,
    /// The tables of the positions from 0 on; the last is the longest. On a CPU there is at most
    /// one. On a GPU all are kept: kernels of other threads, and CUDA graphs, may still read the
    /// earlier ones, which together are less than twice as long as the last.
    computed: Arc<Mutex<Vec<RotaryAt>>>,
}

impl Rotary {
    /// The rotation for heads of width `d`, for the positions below `positions`.
    ///
    /// # Errors
    /// [`Error::Value`] if `theta` is not positive and finite, or not above 1 for the scaling `Yarn`;
    /// [`Error::Zero`] if `d` is 0; [`Error::OddHeadDim`] if `d` is odd; [`Error::TooLarge`] for more than 2²⁴ positions, since
    /// f32 does not represent every larger position; [`Error::Candle`] if a tensor cannot be
    /// created.
    pub fn new(theta: f64, d: usize, positions: usize, device: &Device) -> Result<Self> {
        Self::scaled(theta, RotaryScaling::None, d, positions, device)
    }

    /// [`Self::new`] with scaled frequencies.
    ///
    /// # Errors
    /// The errors of [`Self::new`] and of [`RotaryScaling::check`].
    pub fn scaled(
        theta: f64,
        scaling: RotaryScaling,
        d: usize,
        positions: usize,
        device: &Device,
    ) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::Value { field: "theta", expected: "a positive number", got: theta });
        }
        scaling.check()?;
        if matches!(scaling, RotaryScaling::Yarn { .. }) && theta <= 1.0 {
            let expected = "a number above 1, for the scaling Yarn";
            return Err(Error::Value { field: "theta", expected, got: theta });
        }
        if d == 0 {
            return Err(Error::Zero { field: "d, the width of a head" });
        }
        if !d.is_multiple_of(2) {
            return Err(Error::OddHeadDim { got: d });
        }
        if positions > MAX_POSITIONS {
            let (field, max) = ("positions", MAX_POSITIONS);
            return Err(Error::TooLarge { field, got: positions, max });
        }
        let device = device.clone();
        Ok(Self { theta, scaling, d, positions, device, computed: Arc::default() })
    }

    /// The rotation of tokens at these positions: `positions[t]` is the position of token t in
    /// every sequence. With [`RotaryScaling::DynamicNtk`], the frequencies are those of sequences
    /// of at most `trained` tokens.
    ///
    /// # Errors
    /// [`Error::Position`] if a position is out of range. The rotation returns [`Error::Shape`] for
    /// queries or keys of another width or another number of tokens.
    pub fn at(&self, positions: &[u32]) -> Result<RotaryAt> {
        self.check(positions)?;
        self.first(rows(positions))?.select(positions)
    }

    /// The rotations of the positions from 0 on, of at least `rows` of them.
    fn first(&self, rows: usize) -> Result<RotaryAt> {
        let mut computed = self.computed.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match computed.last() {
            Some(last) if last.cos.dim(0)? >= rows => return Ok(last.clone()),
            Some(last) => last.cos.dim(0)?,
            None => 0,
        };
        let end = rows.next_power_of_two().max(FIRST_POSITIONS).min(self.positions);
        // Length 1: `DynamicNtk` has the same frequencies for every length up to its `trained`, and
        // the other scalings ignore the length.
        let mut grown = self.compute(1, known..end)?;
        if let Some(last) = computed.last() {
            let join = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 0);
            grown =
                RotaryAt { cos: join(&last.cos, &grown.cos)?, sin: join(&last.sin, &grown.sin)? };
        }
        if self.device.is_cpu() {
            computed.clear();
        } else {
            // Each thread has its own CUDA stream, which does not wait for this thread's.
            self.device.synchronize()?;
        }
        computed.push(grown.clone());
        Ok(grown)
    }

    /// The cosines and sines of `position · frequency`, for sequences of `length` tokens. The crate
    /// `libm` gives the same bits on every machine; those of the system's functions differ.
    fn compute(&self, length: usize, positions: Range<usize>) -> Result<RotaryAt> {
        let frequencies = self.scaling.frequencies(self.theta, self.d, length);
        let shape = (positions.len(), frequencies.len());
        let angles = || {
            let of_position = |position| frequencies.iter().map(move |f| position as f32 * f);
            positions.clone().flat_map(of_position)
        };
        let table = |function: fn(f32) -> f32| {
            Tensor::from_iter(angles().map(function), &self.device)?.reshape(shape)
        };
        let (cos, sin) = (table(libm::cosf)?, table(libm::sinf)?); // (positions, D / 2)
        Ok(match self.scaling.attention_factor() {
            1.0 => RotaryAt { cos, sin },
            factor => RotaryAt { cos: (cos * factor)?, sin: (sin * factor)? },
        })
    }

    /// The rotation of the `t` tokens of each of `b` sequences, at the positions that
    /// [`AttentionMask::positions`] returns.
    ///
    /// With [`RotaryScaling::DynamicNtk`], the frequencies of a sequence depend on its own length,
    /// from [`AttentionMask::sequence_lengths`]. The rotation of a sequence is therefore the same
    /// in every batch. transformers takes the length of the batch's longest sequence instead.
    ///
    /// # Shapes
    /// the rotation is for queries and keys `(b, H, t, D)`
    /// # Errors
    /// The errors of [`Self::at`] and of [`AttentionMask::sequence_lengths`].
    ///
    /// # Examples
    /// Ragged sequences of 3 and 5 tokens, for a model that was trained with at most 4 tokens:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, QueryKeyTransform, Rotary, RotaryScaling};
    ///
    /// let scaling = RotaryScaling::DynamicNtk { factor: 2., trained: 4 };
    /// let rotary = Rotary::scaled(10_000., scaling, 4, 9, &Cpu)?;
    /// let ragged = AttentionMask::none().with_sequences(&[0, 3, 8])?;
    /// let x = Tensor::new(&[0f32, 1., 0., 0.], &Cpu)?.broadcast_as((1, 1, 8, 4))?;
    /// let rotated = rotary.of_mask(&ragged, 1, 8)?.query(&x)?.squeeze(0)?.squeeze(0)?;
    /// let rotated = rotated.to_vec2::<f32>()?;
    /// assert_eq!(rotated[2][3], 0.02f32.sin()); // position 2, frequency 10000^(−2/4)
    /// // With 5 tokens, the base is 10000 · (2·5/4 − 1)² = 22500; its square root is 150.
    /// assert!((rotated[3 + 2][3] - (2f32 / 150.).sin()).abs() < 1e-8);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn of_mask(&self, mask: &AttentionMask, b: usize, t: usize) -> Result<RotaryAt> {
        let positions = mask.positions(t)?;
        let lengths = match self.scaling {
            RotaryScaling::DynamicNtk { .. } => mask.sequence_lengths(b, t)?,
            _ => vec![],
        };
        if !lengths.iter().any(|&length| self.scaling.depends_on(length)) {
            return self.at(&positions);
        }
        let Some(ranges) = mask.query_ranges() else {
            // Each padded sequence has all positions.
            let rotations = lengths.iter().map(|&length| self.with_length(length, &positions));
            return join(rotations, |tables| Tensor::stack(tables, 0)); // (B, T, D / 2)
        };
        let rotations = ranges.into_iter().map(|QueryRange { queries, keys, .. }| {
            self.with_length(keys.len(), &positions[queries])
        });
        join(rotations, |tables| Tensor::cat(tables, 0)) // (T, D / 2)
    }

    /// The rotation of tokens at these positions of a sequence of `length` tokens.
    fn with_length(&self, length: usize, positions: &[u32]) -> Result<RotaryAt> {
        if !self.scaling.depends_on(length) {
            return self.at(positions);
        }
        self.check(positions)?;
        self.compute(length, 0..rows(positions))?.select(positions)
    }

    /// The maximum length of a sequence whose frequencies do not depend on its length; `None` if
    /// those of no sequence do.
    pub fn trained(&self) -> Option<usize> {
        match self.scaling {
            RotaryScaling::DynamicNtk { trained, .. } => Some(trained),
            _ => None,
        }
    }

    fn check(&self, positions: &[u32]) -> Result<()> {
        match positions.iter().find(|&&position| position as usize >= self.positions) {
            Some(&got) => Err(Error::Position { got, positions: self.positions }),
            None => Ok(()),
        }
    }
}

/// The rotations with their tables joined by `join`.
fn join(
    rotations: impl Iterator<Item = Result<RotaryAt>>,
    join: impl Fn(&[Tensor]) -> candle_core::Result<Tensor>,
) -> Result<RotaryAt> {
    let tables = rotations.map(|rotation| rotation.map(|RotaryAt { cos, sin }| (cos, sin)));
    let (cos, sin): (Vec<_>, Vec<_>) = tables.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    Ok(RotaryAt { cos: join(&cos)?, sin: join(&sin)? })
}

/// The number of positions from 0 to the largest of these.
fn rows(positions: &[u32]) -> usize {
    positions.iter().max().map_or(0, |&last| last as usize + 1)
}

/// The cosines and sines of the positions of T tokens, from [`Rotary::at`] or [`Rotary::of_mask`].
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{QueryKeyTransform, Rotary};
///
/// let rotation = Rotary::new(10_000., 2, 10, &Cpu)?.at(&[0, 3])?; // D = 2, T = 2
/// let q = Tensor::new(&[[[[1f32, 0.], [1., 0.]]]], &Cpu)?; // (B, H, T, D)
/// let rotated = rotation.query(&q)?.flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!(rotated, [1., 0., 3f32.cos(), 3f32.sin()]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotaryAt {
    cos: Tensor, // (T, D / 2), or (B, T, D / 2)
    sin: Tensor, // the shape of `cos`
}

impl RotaryAt {
    /// The rows of these positions.
    fn select(&self, positions: &[u32]) -> Result<Self> {
        let positions = Tensor::new(positions, self.cos.device())?;
        let rows = |table: &Tensor| match positions.elem_count() {
            0 => table.narrow(0, 0, 0), // `index_select` fails for a table without rows
            _ => table.index_select(&positions, 0),
        };
        Ok(Self { cos: rows(&self.cos)?, sin: rows(&self.sin)? })
    }

    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        expect_rank("x", x, 4, "(B, H, T, D)")?;
        if !x.dtype().is_float() {
            return Err(Error::DType { argument: "x", expected: "floats", got: x.dtype() });
        }
        if x.elem_count() == 0 {
            return Ok(x.clone()); // `rope` panics
        }
        if !table_fits(&self.cos, x)? {
            let (t, d) = (self.cos.dim(D::Minus2)?, 2 * self.cos.dim(D::Minus1)?);
            let expected = format!("(B, H, T, D) with T = {t} and D = {d}, as in the rotary table");
            return Err(shape_error("x", x, expected));
        }
        let x_f32 = ops::widen(x)?;
        let (cos, sin) = (self.cos.to_dtype(x_f32.dtype())?, self.sin.to_dtype(x_f32.dtype())?);
        let rotated = if x.track_op() {
            rotate_with_gradients(&x_f32, &cos, &sin)?
        } else {
            rope(&x_f32.contiguous()?, &cos, &sin)?
        };
        Ok(rotated.to_dtype(x.dtype())?)
    }
}

/// The rotation of [`rope`] by candle operations that have gradients. `rope` has none.
fn rotate_with_gradients(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(3)? / 2;
    let (first, second) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?); // (B, H, T, D / 2)
    let axis = cos.rank() - 2; // an axis of size 1 before T, to broadcast over the heads
    let (cos, sin) = (cos.unsqueeze(axis)?, sin.unsqueeze(axis)?); // (1, T, ..) or (B, 1, T, ..)
    let rotated = [
        (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?,
        (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?,
    ];
    Ok(Tensor::cat(&rotated, 3)?)
}

impl QueryKeyTransform for RotaryAt {
    fn query(&self, q: &Tensor) -> Result<Tensor> {
        self.rotate(q)
    }

    fn key(&self, k: &Tensor) -> Result<Tensor> {
        self.rotate(k)
    }

    fn query_and_key(
        &self,
        heads: &Tensor,
        h: usize,
        norms: Option<&HeadNorms>,
    ) -> Result<(Tensor, Tensor)> {
        check_heads(heads, h)?;
        let kernel_norms = norms.map(|norms| norms.kernel(h));
        // An empty tensor can have strides of 0, which candle refuses for in-place operations.
        let is_empty = heads.elem_count() == 0;
        if is_empty || rotate_in_place(heads, kernel_norms, &self.cos, &self.sin)? {
            return queries_and_keys(heads, h, None);
        }
        if norms.is_none() {
            return queries_and_keys(&self.rotate(heads)?, h, None);
        }
        let (q, k) = queries_and_keys(heads, h, norms)?;
        Ok((self.rotate(&q)?, self.rotate(&k)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};

    use super::*;
    use crate::testing::max_difference;

    #[test]
    fn batches_without_tokens_are_accepted() -> Result<()> {
        let rotary = Rotary::new(1e4, 6, 4, &Cpu)?.at(&[])?;
        for dtype in [DType::F32, DType::BF16] {
            let x = Tensor::zeros((2, 3, 0, 6), dtype, &Cpu)?;
            assert_eq!(rotary.query(&x)?.dims(), [2, 3, 0, 6]);
            assert_eq!(rotary.query_and_key(&x, 2, None)?.0.dims(), [2, 2, 0, 6]);
        }
        Ok(())
    }

    #[test]
    fn overlapping_views_are_rotated_as_copies_are() -> Result<()> {
        let at = Rotary::new(1e4, 4, 100, &Cpu)?.at(&[0, 1, 2, 3, 4, 5])?;
        let view = Tensor::arange(0f32, 20., &Cpu)?.reshape((1, 2, 10))?;
        let view = view.unfold(2, 4, 1)?.narrow(2, 0, 6)?; // (1, 2, 6, 4), strides (20, 10, 1, 1)
        let (q, k) = at.query_and_key(&view, 1, None)?;
        let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        assert_eq!(values(&Tensor::cat(&[q, k], 1)?)?, values(&at.query(&view.contiguous()?)?)?);
        Ok(())
    }

    /// Tables that grow in any order, and in several threads at once, have the bits of a table that
    /// is computed for all positions.
    #[test]
    fn tables_grow_to_the_same_bits_in_any_order() -> Result<()> {
        let (d, positions) = (6, 5000);
        let yarn = RotaryScaling::Yarn {
            factor: 2.0,
            trained: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.1,
        };
        for scaling in [RotaryScaling::None, RotaryScaling::Linear { factor: 3.0 }, yarn] {
            let new = || Rotary::scaled(1e6, scaling, d, positions, &Cpu);
            let bits = |at: RotaryAt| -> Result<Vec<u32>> {
                let values = Tensor::cat(&[at.cos, at.sin], 0)?.flatten_all()?.to_vec1::<f32>()?;
                Ok(values.into_iter().map(f32::to_bits).collect())
            };
            let all = new()?.compute(1, 0..positions)?;
            let expected = |last: u32| bits(all.select(&[0, last / 2, last])?);
            let got = |rotary: &Rotary, last: u32| bits(rotary.at(&[0, last / 2, last])?);
            for order in [&[3, 255, 256, 900, 4999, 7][..], &[4999, 0, 300], &[0, 4998]] {
                let rotary = new()?;
                assert!(rotary.computed.lock().unwrap().is_empty());
                for &last in order {
                    assert_eq!(got(&rotary, last)?, expected(last)?, "{scaling:?} {last}");
                    let computed = rotary.computed.lock().unwrap();
                    let rows = computed[0].cos.dim(0)?;
                    let bound = |last: &u32| (2 * *last as usize).max(FIRST_POSITIONS);
                    assert!(rows <= order.iter().map(bound).max().unwrap().min(positions));
                    assert_eq!(computed.len(), 1);
                }
            }
            let rotary = new()?;
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|thread| {
                        let (rotary, got, expected) = (rotary.clone(), &got, &expected);
                        scope.spawn(move || {
                            for i in 0..20 {
                                let last = (i * 251 + thread * 1009) % positions as u32;
                                assert_eq!(got(&rotary, last)?, expected(last)?);
                            }
                            Ok::<_, Error>(())
                        })
                    })
                    .collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })?;
        }
        Ok(())
    }

    #[test]
    fn positions_and_shapes_that_do_not_fit_are_errors() -> Result<()> {
        let rotary = Rotary::new(1e4, 4, 9, &Cpu)?;
        let error = rotary.at(&[3, 9]).unwrap_err().to_string();
        assert_eq!(error, "position 9 is out of range: expected less than 9");
        assert!(Rotary::new(1e4, 4, (1 << 24) + 1, &Cpu).is_err());
        let scaling = RotaryScaling::DynamicNtk { factor: 2.0, trained: 4 };
        let dynamic = Rotary::scaled(1e4, scaling, 4, 9, &Cpu)?;
        assert!(dynamic.of_mask(&AttentionMask::none(), 1, 10).is_err());
        let at = rotary.at(&[3, 4])?;
        for (t, d) in [(1, 4), (3, 4), (2, 2), (2, 8), (2, 5)] {
            let x = Var::zeros((1, 2, t, d), DType::F32, &Cpu)?;
            assert!(matches!(at.query(&x), Err(Error::Shape { .. })), "tracked, {t} {d}");
            let x = x.as_detached_tensor();
            assert!(matches!(at.query(&x), Err(Error::Shape { .. })), "{t} {d}");
            let both = at.query_and_key(&x, 1, None);
            assert!(matches!(both, Err(Error::Shape { .. })), "{t} {d}");
        }
        Ok(())
    }

    /// Compares with the definition in f64. Results are below 2, so f16 and bf16 round them by at
    /// most 2⁻¹¹ and 2⁻⁸.
    #[test]
    fn rotations_match_the_definition_in_every_dtype() -> Result<()> {
        let (theta, d, positions) = (160_000.0, 6, [0u32, 7, 3, 40]);
        let rotary = Rotary::new(theta, d, 41, &Cpu)?.at(&positions)?;
        let x = (Tensor::arange(0f32, 48., &Cpu)? * 0.9)?.sin()?.reshape((1, 2, 4, d))?;
        // Angles are computed in f32, also for f64 inputs.
        for (dtype, tolerance) in
            [(DType::F64, 1e-6), (DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)]
        {
            let input = x.to_dtype(dtype)?;
            let got =
                rotary.query(&input)?.to_dtype(DType::F64)?.flatten_to(2)?.to_vec2::<f64>()?;
            let rows = input.to_dtype(DType::F64)?.flatten_to(2)?.to_vec2::<f64>()?;
            for (i, (got, x)) in got.iter().zip(&rows).enumerate() {
                for pair in 0..d / 2 {
                    let frequency = theta.powf(-2.0 * pair as f64 / d as f64);
                    let (sin, cos) = (f64::from(positions[i % 4]) * frequency).sin_cos();
                    let (a, b) = (x[pair], x[pair + d / 2]);
                    for (got, expected) in
                        [(got[pair], a * cos - b * sin), (got[pair + d / 2], b * cos + a * sin)]
                    {
                        assert!((got - expected).abs() < tolerance, "{dtype:?} {got} {expected}");
                    }
                }
            }
        }
        Ok(())
    }

    /// A sequence has the same rotation alone, in a ragged batch, and padded at its end by a
    /// padding mask or by valid lengths.
    #[test]
    fn dynamic_frequencies_depend_on_the_length_of_each_sequence() -> Result<()> {
        let scaling = RotaryScaling::DynamicNtk { factor: 2.0, trained: 4 };
        let rotary = Rotary::scaled(1000.0, scaling, 6, 9, &Cpu)?;
        let x = (Tensor::arange(0f32, 192., &Cpu)? * 0.9)?.sin()?.reshape((2, 2, 8, 6))?;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let x = x.to_dtype(dtype)?;
            let rotate = |x: &Tensor, mask: &AttentionMask| -> Result<Vec<Vec<f32>>> {
                let (b, _h, t, _d) = x.dims4()?;
                let rotated = rotary.of_mask(mask, b, t)?.query(x)?.to_dtype(DType::F32)?;
                Ok(rotated.transpose(0, 1)?.get(1)?.flatten_to(1)?.to_vec2()?)
            };
            let alone = |b: usize, from: usize, length: usize| {
                rotate(&x.narrow(0, b, 1)?.narrow(2, from, length)?, &AttentionMask::none())
            };
            let (long, short) = (alone(0, 0, 5)?, alone(0, 5, 3)?);
            let ragged = AttentionMask::none().with_sequences(&[0, 0, 5, 8])?;
            let ragged = rotate(&x.narrow(0, 0, 1)?, &ragged)?;
            assert_eq!(ragged, [long.clone(), short].concat());

            let padded = Tensor::new(&[[1u8, 1, 1, 0, 1, 0, 0, 0], [1; 8]], &Cpu)?;
            let padded = rotate(&x, &AttentionMask::none().with_padding(&padded)?)?;
            assert_eq!(padded[..5], long);
            assert_eq!(padded[8..], alone(1, 0, 8)?);
            let lens = AttentionMask::none().with_valid_lens(&Tensor::new(&[5u32, 8], &Cpu)?)?;
            assert_eq!(rotate(&x, &lens)?, padded);
            // A tracked tensor takes the path with gradients.
            let tracked = Var::from_tensor(&x)?;
            let expected: Vec<f32> = padded.concat();
            for (got, expected) in rotate(tracked.as_tensor(), &lens)?.concat().iter().zip(expected)
            {
                assert!((got - expected).abs() <= 1e-6, "{dtype:?} {got} {expected}");
            }
        }
        Ok(())
    }

    /// A rotation preserves norms, so the gradient of the squared norm is `2x`.
    #[test]
    fn gradients_pass_through_a_rotation() -> Result<()> {
        let rotary = Rotary::new(100.0, 4, 9, &Cpu)?.at(&[8, 2, 5])?;
        let x = Var::from_tensor(&Tensor::arange(1f32, 13., &Cpu)?.reshape((1, 1, 3, 4))?)?;
        let gradients = rotary.key(&x)?.sqr()?.sum_all()?.backward()?;
        let expected = (x.as_tensor() * 2.0)?;
        assert!(max_difference(gradients.get(&x).unwrap(), &expected)? < 1e-4);
        Ok(())
    }

    #[test]
    fn settings_without_a_finite_rotation_are_errors() {
        let error =
            |theta, scaling| Rotary::scaled(theta, scaling, 4, 9, &Cpu).unwrap_err().to_string();
        for theta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let expected = format!("theta {theta} is invalid: expected a positive number");
            assert_eq!(error(theta, RotaryScaling::None), expected);
        }
        let zero = error(1e4, RotaryScaling::Linear { factor: 0.0 });
        assert_eq!(zero, "factor of the rotary scaling 0 is invalid: expected a positive number");
        let zero = error(1e4, RotaryScaling::DynamicNtk { factor: 2.0, trained: 0 });
        assert_eq!(
            zero,
            "trained length of the rotary scaling is zero: expected at least 1, got 0"
        );
        assert!(Rotary::new(1e4, 0, 9, &Cpu).is_err());
        assert!(Rotary::new(1e4, 4, 0, &Cpu).unwrap().at(&[]).is_ok()); // no tokens
    }

    #[test]
    fn heads_of_another_rank_are_errors_and_broadcast_heads_are_rotated() -> Result<()> {
        let rotation = Rotary::new(10_000., 4, 9, &Cpu)?.at(&[0, 1])?;
        let x = Tensor::new(&[1f32, 2., 3., 4.], &Cpu)?;
        let error = rotation.query_and_key(&x.broadcast_as((3, 2, 4))?, 1, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "heads has the wrong shape: expected (B, H + G, T, D) with H = 1, got [3, 2, 4]"
        );
        let heads = x.broadcast_as((1, 2, 2, 4))?;
        let (query, key) = rotation.query_and_key(&heads, 1, None)?;
        assert!(max_difference(&query, &rotation.query(&heads.narrow(1, 0, 1)?)?)? < 1e-6);
        assert!(max_difference(&key, &query)? < 1e-6);
        assert!(rotation.query_and_key(&heads, 3, None).is_err());
        let error = rotation.query(&Tensor::zeros((3, 2, 4), DType::F32, &Cpu)?).unwrap_err();
        assert_eq!(
            error.to_string(),
            "x has the wrong shape: expected (B, H, T, D), got [3, 2, 4]"
        );
        let error = rotation.query(&heads.to_dtype(DType::U32)?).unwrap_err().to_string();
        assert_eq!(error, "x has the wrong dtype: expected floats, got U32");
        Ok(())
    }

    #[test]
    fn an_odd_head_width_is_an_error() {
        assert_eq!(
            Rotary::new(10.0, 5, 2, &Cpu).unwrap_err().to_string(),
            "head width 5 is odd: expected an even width for rotary position embedding"
        );
    }
}
