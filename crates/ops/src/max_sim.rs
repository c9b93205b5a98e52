//! MaxSim, the score of a query and a document that have a vector per token.

use half::{f16, slice::HalfFloatSliceExt};
use mha_kernels::{
    ComputeType, Isa, PackedLinear, RowPooling, Rows, f32_from_f16, pooled_linear, serially,
};
use rayon::prelude::*;

use crate::Result;

/// Number of values of documents that a thread computes together, 96 KiB in f32: they stay in the
/// cache between conversion and product.
const VALUES: usize = 3 << 13;

/// The score of a document without vectors, as in sentence-transformers.
const NO_VECTORS: f32 = -1e9;

/// `Σᵢ maxⱼ qᵢ·dⱼ` for the vectors qᵢ of one query and the vectors dⱼ of many documents. The
/// products of all pairs of vectors are never in memory.
///
/// # Source
/// Khattab and Zaharia 2020, <https://arxiv.org/abs/2004.12832>.
///
/// # Examples
/// ```
/// use ops::{MaxSim, VectorSlice};
///
/// let query = MaxSim::new(&[1., 0., 0., 2.], 2)?; // two vectors
/// let documents = [3., 1., -1., 0.5, 0., 1.]; // of three documents, the second is empty
/// let scores = query.scores(VectorSlice::F32(&documents), &[0, 2, 2, 3]);
/// assert_eq!(scores, [5., -1e9, 2.]);
/// # Ok::<(), ops::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MaxSim {
    isa: Isa,
    /// The vectors of the query as rows of a weight; `None` for a query without vectors.
    query: Option<PackedLinear>,
    width: usize,
}

/// The values of vectors, one after another.
#[derive(Clone, Copy, Debug)]
pub enum VectorSlice<'a> {
    /// Values in f32.
    F32(&'a [f32]),
    /// Values in f16, which are converted to f32 before the products.
    F16(&'a [f16]),
}

impl MaxSim {
    /// The scores of a query.
    ///
    /// # Shapes
    /// `query`: `(Q, width)`
    /// # Errors
    /// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    /// # Panics
    /// If the length of `query` is not a multiple of `width`, or if `width` is 0.
    pub fn new(query: &[f32], width: usize) -> Result<Self> {
        assert!(query.len().is_multiple_of(width), "query: expected vectors of {width} values");
        let (isa, count) = (Isa::get()?, query.len() / width);
        let pack = || PackedLinear::pack(isa, ComputeType::F32, query, count, width, None);
        Ok(Self { isa, query: (count > 0).then(pack), width })
    }

    /// The score of each document. Document i has the vectors `offsets[i]..offsets[i + 1]`. A
    /// document without vectors has the score −10⁹. A score does not depend on the other documents.
    ///
    /// # Shapes
    /// `vectors`: `(N, width)`; `offsets`: `(B + 1,)`; returns `(B,)`
    /// # Numerics
    /// products and their sums in f32, the sum over the query's vectors in f64
    /// # Panics
    /// If the offsets decrease or exceed N.
    pub fn scores(&self, vectors: VectorSlice, offsets: &[usize]) -> Vec<f32> {
        let Some(query) = &self.query else {
            let score = |at: &[usize]| if at[0] == at[1] { NO_VECTORS } else { 0.0 };
            return offsets.windows(2).map(score).collect();
        };
        let mut parts = vec![];
        let mut start = 0;
        while start + 1 < offsets.len() {
            let max = offsets[start] + VALUES / self.width;
            let more = offsets[start + 1..].partition_point(|&end| end <= max).max(1);
            parts.push(&offsets[start..=start + more]);
            start += more;
        }
        let scores = parts.into_par_iter().map_init(Vec::new, |converted, offsets| {
            let range = offsets[0] * self.width..offsets[offsets.len() - 1] * self.width;
            let rows = match vectors {
                VectorSlice::F32(values) => &values[range],
                VectorSlice::F16(values) => {
                    converted.resize(range.len(), 0.0);
                    f32_from_f16(self.isa, values[range].reinterpret_cast(), converted);
                    &converted[..]
                }
            };
            let own: Vec<usize> = offsets.iter().map(|offset| offset - offsets[0]).collect();
            let pool = || pooled_linear(self.isa, Rows::F32(rows), query, &own, RowPooling::Max);
            let maxima = serially(pool);
            let documents = maxima.chunks_exact(query.out()).zip(own.windows(2));
            let score = |(maxima, at): (&[f32], &[usize])| {
                if at[0] == at[1] {
                    return NO_VECTORS;
                }
                maxima.iter().map(|&max| f64::from(max)).sum::<f64>() as f32
            };
            documents.map(score).collect::<Vec<f32>>()
        });
        scores.collect::<Vec<_>>().concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_those_of_the_definition_and_do_not_depend_on_other_documents() -> Result<()> {
        let (width, queries) = (24, 7);
        let value = |i: usize| ((i * i + 3 * i) as f32 * 0.37).sin();
        let query: Vec<f32> = (0..queries * width).map(value).collect();
        let counts = (0..300).map(|i| i * 5 % 23);
        let offsets: Vec<usize> = std::iter::once(0)
            .chain(counts.scan(0, |sum, count| {
                *sum += count;
                Some(*sum)
            }))
            .collect();
        let n = offsets[offsets.len() - 1];
        let half: Vec<f16> = (0..n * width).map(|i| f16::from_f32(value(i + 7))).collect();
        let vectors: Vec<f32> = half.iter().map(|x| x.to_f32()).collect();
        let max_sim = MaxSim::new(&query, width)?;
        let scores = max_sim.scores(VectorSlice::F16(&half), &offsets);
        assert_eq!(scores, max_sim.scores(VectorSlice::F32(&vectors), &offsets));
        for (i, at) in offsets.windows(2).enumerate() {
            let rows = &vectors[at[0] * width..at[1] * width];
            let dot = |q: &[f32], d: &[f32]| q.iter().zip(d).map(|(q, d)| q * d).sum::<f32>();
            let maximum = |q| rows.chunks(width).map(|d| dot(q, d)).fold(f32::MIN, f32::max);
            let expected = query.chunks(width).map(maximum).sum();
            let expected: f32 = if rows.is_empty() { NO_VECTORS } else { expected };
            assert!((scores[i] - expected).abs() <= 1e-5 * expected.abs().max(10.0), "{i}");
            let alone = max_sim.scores(VectorSlice::F32(rows), &[0, at[1] - at[0]]);
            assert_eq!(alone[0].to_bits(), scores[i].to_bits(), "{i}");
        }
        assert_eq!(MaxSim::new(&[], width)?.scores(VectorSlice::F32(&[]), &[0, 0]), [NO_VECTORS]);
        Ok(())
    }
}
