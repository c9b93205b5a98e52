//! Disentangled attention: the scores of a query and a key also depend on vectors of their relative
//! position. He et al. 2021, <https://arxiv.org/abs/2006.03654>, equation 4.

use std::sync::Arc;

use candle_core::{D, Tensor};
use libm::logf;
use ops::RelativeRows;

use crate::{Error, Result, shape::shape_error};

/// The projected relative positions of an attention module, for
/// [`AttentionOptions::with_disentangled`](crate::AttentionOptions::with_disentangled).
///
/// The score of query i and key j is `(qᵢ·kⱼ + qᵢ·K[r] + kⱼ·Q[r]) / √(n·D)`, where n is the number
/// of terms. If [`AttentionConfig::scale`](crate::AttentionConfig::scale) is set, its value replaces
/// `1/√D`. The row r depends on the distance from the query to the key. K and Q are linear maps
/// of the same embeddings of relative positions. The terms with K and Q are optional.
///
/// # Examples
/// The scores have the term `qᵢ·K[r]` but not `kⱼ·Q[r]`, so only `keys` is given. A key after the
/// query has row 1, any other key row 0:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarBuilder;
/// use mha::{AttentionConfig, AttentionMask, AttentionOptions, DisentangledPositions};
/// use mha::{HeadWeights, SelfAttention};
///
/// // All weights are 0 and all biases 1, so queries, keys and values are vectors of ones.
/// let tensors = ["query", "key", "value", "output"].into_iter().flat_map(|name| {
///     let weight = Tensor::zeros((2, 2), DType::F32, &Cpu).unwrap();
///     let bias = Tensor::ones(2, DType::F32, &Cpu).unwrap();
///     [(format!("{name}.weight"), weight), (format!("{name}.bias"), bias)]
/// });
/// let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Cpu);
/// let attention = SelfAttention::new(&AttentionConfig::new(2, 1), vb)?; // E, H
///
/// let keys = Tensor::new(&[[[0f32, 0.], [3f32.ln(), 3f32.ln()]]], &Cpu)?; // (H, R, D)
/// let rows = [0, 0, 1]; // of the distances −1, 0, 1
/// let positions = DisentangledPositions::new(Some(keys), None, rows.as_slice().into())?;
/// let options = AttentionOptions::new().with_weights(HeadWeights::All);
/// let options = options.with_disentangled(&positions);
/// let x = Tensor::zeros((1, 2, 2), DType::F32, &Cpu)?;
/// let (_, weights) = attention.forward_with(&x, &AttentionMask::none(), options)?;
/// let weights = weights.unwrap().flatten_all()?.to_vec1::<f32>()?;
/// // The score of the first query and the second key is larger by 2 · ln 3 / √(2·2) = ln 3.
/// let expected = [0.25, 0.75, 0.5, 0.5];
/// assert!(weights.iter().zip(expected).all(|(w, e)| (w - e).abs() < 1e-6), "{weights:?}");
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// He et al. 2021, equation 4; `DisentangledSelfAttention` of `DebertaV2Model` in transformers.
#[derive(Clone, Debug)]
pub struct DisentangledPositions {
    keys: Option<Tensor>,    // (H, R, D)
    queries: Option<Tensor>, // (H, R, D)
    rows: RelativeRows,      // (2·radius + 1,)
}

impl DisentangledPositions {
    /// Creates relative positions from their projections.
    ///
    /// # Shapes
    /// - `keys`: `(H, R, D)`, multiplied by queries; `queries`: `(H, R, D)`, multiplied by keys
    /// - `rows`: the row of each distance from −radius to radius, `2·radius + 1` numbers below R.
    ///   The distance is the index of the key minus that of the query.
    /// # Errors
    /// [`Error::Shape`], naming the argument, if `keys` or `queries` does not have three
    /// dimensions, if its R is too small for `rows`, or if the length of `rows` is even;
    /// [`Error::Zero`] if `rows` is empty.
    /// Attention returns [`Error::Shape`] if H or D is not that of the module, or if a distance
    /// exceeds the radius.
    pub fn new(keys: Option<Tensor>, queries: Option<Tensor>, rows: Arc<[u32]>) -> Result<Self> {
        let Some(&max) = rows.iter().max() else {
            return Err(Error::Zero { field: "number of relative positions" });
        };
        if rows.len().is_multiple_of(2) {
            return Err(rows_error(&rows, "an odd length (2·radius + 1)".to_string()));
        }
        let least = max as usize + 1;
        let positions = Self { keys, queries, rows: RelativeRows::new(rows) };
        for (name, x) in positions.projections() {
            if x.rank() != 3 || x.dim(1)? < least {
                let expected = format!("(H, R, D) with R of at least {least}");
                return Err(shape_error(name, x, expected));
            }
        }
        Ok(positions)
    }

    /// The projections that are present, each with its name in error messages.
    fn projections(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let all = [("position keys", &self.keys), ("position queries", &self.queries)];
        all.into_iter().filter_map(|(name, x)| Some((name, x.as_ref()?)))
    }

    /// The factor of the scores of n terms for heads of width `d`: `1/√(n·D)`, or `scale/√n` if the
    /// config has a `scale`. The sum of n terms of equal variance has n times their variance, which
    /// the division by √n compensates for any `scale`.
    pub(crate) fn scale(&self, d: usize, scale: Option<f64>) -> f64 {
        let terms = 1 + self.projections().count();
        match scale {
            None => 1.0 / ((terms * d) as f64).sqrt(),
            Some(scale) => scale / (terms as f64).sqrt(),
        }
    }

    /// Whether autograd tracks a projection.
    pub fn is_tracked(&self) -> bool {
        self.projections().any(|(_, x)| x.track_op())
    }

    /// The projections of head `h`.
    pub(crate) fn head(&self, h: usize) -> Result<Self> {
        let head = |x: &Option<Tensor>| x.as_ref().map(|x| x.narrow(0, h, 1)).transpose();
        let (keys, queries) = (head(&self.keys)?, head(&self.queries)?);
        Ok(Self { keys, queries, rows: self.rows.clone() })
    }

    /// The projections for the kernels.
    pub(crate) fn terms(&self) -> ops::RelativeTerms<'_> {
        let (keys, queries) = (self.keys.as_ref(), self.queries.as_ref());
        ops::RelativeTerms { keys, queries, rows: &self.rows }
    }

    /// Checks that the projections have `h` heads of width `d`, and that `rows` covers the
    /// distances in sequences of up to `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`], naming the argument.
    pub(crate) fn check(&self, [h, d]: [usize; 2], tokens: usize) -> Result<()> {
        for (name, x) in self.projections() {
            if x.dim(0)? != h || x.dim(2)? != d {
                return Err(shape_error(name, x, format!("(H, R, D) with H = {h} and D = {d}")));
            }
        }
        let (least, got) = (tokens.max(1).saturating_mul(2) - 1, self.rows.len());
        if got < least {
            let expected = format!("a length of at least {least} for {tokens} tokens");
            return Err(Error::Shape { argument: "rows", expected, got: vec![got] });
        }
        Ok(())
    }

    /// `qᵢ·K[r] + kⱼ·Q[r]` of all queries and keys, by candle's operations.
    ///
    /// # Shapes
    /// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`, contiguous, of the same dtype; `positions`: those
    /// of the T queries and of the S keys, counted from the first key; returns `(B, H, T, S)`
    pub(crate) fn scores(
        &self,
        q: &Tensor,
        k: &Tensor,
        [query_positions, key_positions]: [&[usize]; 2],
    ) -> Result<Tensor> {
        let ((b, h, t, d), (_b, g, s, _d)) = (q.dims4()?, k.dims4()?);
        let radius = self.rows.len() / 2;
        // The distance of tokens of different ragged sequences may exceed the radius. The mask
        // hides these tokens from each other.
        let row = |t: usize, s: usize| {
            let key = radius + key_positions[s];
            self.rows[key.saturating_sub(query_positions[t]).min(2 * radius)]
        };
        let index = |rows: Vec<u32>, [n, m]: [usize; 2]| -> Result<Tensor> {
            let index = Tensor::from_vec(rows, (1, 1, n, m), q.device())?;
            Ok(index.broadcast_as((b, h, n, m))?.contiguous()?)
        };
        let mut sum = Tensor::zeros((b, h, t, s), q.dtype(), q.device())?;
        if let Some(keys) = &self.keys {
            let rows = (0..t).flat_map(|t| (0..s).map(move |s| row(t, s))).collect();
            let products = product(q, keys)?; // (B, H, T, R)
            sum = (sum + products.gather(&index(rows, [t, s])?, D::Minus1)?)?;
        }
        if let Some(queries) = &self.queries {
            let rows = (0..s).flat_map(|s| (0..t).map(move |t| row(t, s))).collect();
            let k = k.unsqueeze(2)?.broadcast_as((b, g, h / g, s, d))?.reshape((b, h, s, d))?;
            let products = product(&k, queries)?; // (B, H, S, R)
            let scores = products.gather(&index(rows, [s, t])?, D::Minus1)?; // (B, H, S, T)
            sum = (sum + scores.transpose(2, 3)?)?;
        }
        Ok(sum)
    }
}

/// The [`Error::Shape`] for a number of rows other than `expected`.
fn rows_error(rows: &[u32], expected: String) -> Error {
    Error::Shape { argument: "rows", expected, got: vec![rows.len()] }
}

/// `x·vᵀ` for `x` `(B, H, T, D)` and `v` `(H, R, D)`.
fn product(x: &Tensor, v: &Tensor) -> Result<Tensor> {
    let v = v.to_dtype(x.dtype())?.t()?.contiguous()?.unsqueeze(0)?; // (1, H, D, R)
    Ok(x.contiguous()?.broadcast_matmul(&v)?)
}

/// The relative position of a key in DeBERTa, for a signed distance: the index of the query minus
/// that of the key. [`DisentangledPositions`] uses the opposite sign.
///
/// The position equals the distance if the absolute distance is at most `num_buckets / 2`. Larger
/// distances share positions, which grow logarithmically: for an even `num_buckets`, a distance of
/// `max_distance − 1` has the position `num_buckets − 1`. Distances from `max_distance` on can have
/// positions above `num_buckets − 1`; the caller must clamp the positions.
///
/// # Examples
/// ```
/// let position = |distance| mha::log_relative_position(distance, 256, 512);
/// assert_eq!([0, 1, -127, 128].map(position), [0, 1, -127, 128]);
/// assert_eq!([129, 200, -200, 511].map(position), [129, 169, -169, 255]);
/// ```
/// # Panics
/// If `num_buckets` is below 4 or `max_distance` is not above `num_buckets / 2 + 1`.
/// # Source
/// `make_log_bucket_position` of `DebertaV2Model` in transformers 5.23, which computes in f32.
pub fn log_relative_position(distance: isize, num_buckets: usize, max_distance: usize) -> isize {
    let exact = num_buckets / 2;
    assert!(
        exact > 1 && max_distance > exact + 1,
        "expected at least 4 buckets and a max_distance above num_buckets / 2 + 1, got {num_buckets} \
         buckets and a max_distance of {max_distance}"
    );
    if distance.unsigned_abs() <= exact {
        return distance;
    }
    let ratio = distance.unsigned_abs() as f32 / exact as f32;
    let max_ratio = ((max_distance - 1) as f64 / exact as f64) as f32;
    let above = (logf(ratio) / logf(max_ratio) * (exact - 1) as f32).ceil() as isize;
    (exact as isize + above) * distance.signum()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};
    use candle_nn::VarBuilder;

    use super::*;
    use crate::{AttentionConfig, AttentionMask, AttentionOptions, Init, MultiHeadAttention};

    /// A tensor whose elements all differ.
    fn wave(shape: &[usize], step: f64) -> Result<Tensor> {
        let n = shape.iter().product::<usize>();
        Ok((Tensor::arange(0f32, n as f32, &Cpu)? * step)?.sin()?.reshape(shape)?)
    }

    /// The gradient of a weighted sum of outputs, with respect to the position embeddings, equals a
    /// difference quotient.
    #[test]
    fn embeddings_of_positions_get_gradients() -> Result<()> {
        let vb = Init::Xavier.var_builder(&candle_nn::VarMap::new(), 3, DType::F32, &Cpu);
        let tensors = MultiHeadAttention::new(&AttentionConfig::new(6, 2), vb)?.tensors()?;
        let tensors = tensors.into_iter().map(|(name, x)| (name, x.detach())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let attention = MultiHeadAttention::new(&AttentionConfig::new(6, 2), vb)?;
        let x = (wave(&[2, 5, 6], 0.7)? * 2.0)?;
        let loss = |embeddings: &Tensor| -> Result<Tensor> {
            let (keys, queries) = attention.project_positions(embeddings)?;
            let rows: Vec<u32> = (0..9).map(|i| i * 2 % 7).collect();
            let positions =
                DisentangledPositions::new(Some(keys), Some(queries), rows.as_slice().into())?;
            let options = AttentionOptions::new().with_disentangled(&positions);
            let (out, _) = attention.forward_with(&x, &x, &x, &AttentionMask::none(), options)?;
            Ok((out * &x)?.sum_all()?)
        };
        let embeddings = Var::from_tensor(&wave(&[7, 6], 0.3)?)?;
        let gradient = loss(&embeddings)?.backward()?.get(&embeddings).unwrap().to_vec2::<f32>()?;
        for (row, column) in [(0, 0), (1, 5), (4, 2), (6, 3)] {
            let shifted = |step: f64| -> Result<f32> {
                let mut one = vec![0f32; 42];
                one[row * 6 + column] = 1.0;
                let one = (Tensor::from_vec(one, (7, 6), &Cpu)? * step)?;
                Ok(loss(&(embeddings.as_tensor() + one)?)?.to_scalar()?)
            };
            let slope = (shifted(0.02)? - shifted(-0.02)?) / 0.04;
            let got = gradient[row][column];
            assert!((got - slope).abs() < 2e-3, "row {row}, column {column}: {got} {slope}");
            assert!(slope.abs() > 1e-3, "the loss does not depend on row {row}");
        }
        Ok(())
    }

    #[test]
    fn fewer_key_value_heads_than_heads_are_an_error() -> Result<()> {
        let vb = Init::Xavier.var_builder(&candle_nn::VarMap::new(), 3, DType::F32, &Cpu);
        let config = AttentionConfig::new(6, 2).with_key_value_heads(1);
        let attention = MultiHeadAttention::new(&config, vb)?;
        assert_eq!(
            attention.project_positions(&wave(&[7, 6], 0.3)?).unwrap_err().to_string(),
            "num_key_value_heads is 1: expected 2, the number of heads, for disentangled attention"
        );
        Ok(())
    }

    #[test]
    fn wrong_shapes_are_errors_that_name_the_argument() -> Result<()> {
        let new = |shape: (usize, usize, usize), rows: &[u32]| {
            let keys = Tensor::zeros(shape, DType::F32, &Cpu)?;
            DisentangledPositions::new(Some(keys), None, rows.into())
        };
        assert_eq!(
            new((2, 3, 4), &[0, 3, 1]).unwrap_err().to_string(),
            "position keys has the wrong shape: expected (H, R, D) with R of at least 4, \
             got [2, 3, 4]"
        );
        assert_eq!(
            new((2, 3, 4), &[]).unwrap_err().to_string(),
            "number of relative positions is zero: expected at least 1, got 0"
        );
        assert_eq!(
            new((2, 3, 4), &[0, 1]).unwrap_err().to_string(),
            "rows has the wrong shape: expected an odd length (2·radius + 1), got [2]"
        );
        let positions = new((2, 3, 4), &[0, 2, 1])?;
        assert_eq!(
            positions.check([3, 4], 2).unwrap_err().to_string(),
            "position keys has the wrong shape: expected (H, R, D) with H = 3 and D = 4, \
             got [2, 3, 4]"
        );
        assert_eq!(
            positions.check([2, 4], 3).unwrap_err().to_string(),
            "rows has the wrong shape: expected a length of at least 5 for 3 tokens, got [3]"
        );
        Ok(())
    }
}
