//! Exact search of multi-vector embeddings by MaxSim: every row of the corpus is compared.

use ops::{MaxSim, VectorSlice};

use super::{
    multi_vector::{LateInteraction, MultiVector},
    search::{Hit, Nearest},
};
use crate::{InputError, Result};

/// Finds the rows of a corpus with the highest MaxSim to each query.
///
/// # Examples
/// ```
/// use encoder::{LateInteraction, MultiVector, MultiVectorSearch, VectorSlice};
///
/// let query = MultiVector::new(vec![1., 0., 0., 2.], 2); // two vectors
/// let search = MultiVectorSearch::new(&[query], LateInteraction::MaxSim, 2)?;
/// let vectors = [3., 1., -1., 0.5, 0., 1.]; // rows 0 and 1 have two vectors and one
/// let hits = search.scan(0, VectorSlice::F32(&vectors), &[0, 2, 3])?.into_hits();
/// assert_eq!(hits[0].iter().map(|hit| (hit.row, hit.score)).collect::<Vec<_>>(), [(0, 5.), (1, 2.)]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiVectorSearch {
    /// Each query, with its number of vectors.
    queries: Vec<(MaxSim, usize)>,
    dimension: Option<usize>,
    similarity: LateInteraction,
    top: usize,
}

impl MultiVectorSearch {
    /// A search for the `top` rows with the highest score for each query.
    ///
    /// # Errors
    /// [`InputError::QueryWidth`] if the vectors of the queries differ in length;
    /// [`InputError::EmptyQuery`] for a query without vectors; [`InputError::QueryValue`] for a
    /// query with NaN or ∞; [`ops::Error::Isa`] if `MHA_ISA` names instructions that this machine
    /// lacks.
    pub fn new(queries: &[MultiVector], similarity: LateInteraction, top: usize) -> Result<Self> {
        let dimension = queries.first().map(MultiVector::dimension);
        let max_sim = |(query, vectors): (usize, &MultiVector)| {
            if vectors.is_empty() {
                return Err(InputError::EmptyQuery { query }.into());
            }
            let (expected, got) = (dimension.unwrap_or_default(), vectors.dimension());
            if got != expected {
                return Err(InputError::QueryWidth { query, expected, got }.into());
            }
            if let Some(&value) = vectors.values().iter().find(|value| !value.is_finite()) {
                return Err(InputError::QueryValue { query, value }.into());
            }
            Ok((MaxSim::new(vectors.values(), expected)?, vectors.len()))
        };
        let queries = queries.iter().enumerate().map(max_sim).collect::<Result<_>>()?;
        Ok(Self { queries, dimension, similarity, top })
    }

    /// The length of the queries' vectors; `None` if there are no queries.
    pub fn query_width(&self) -> Option<usize> {
        self.dimension
    }

    /// The rows with the highest score for each query among consecutive rows of the corpus; `first`
    /// is the index of the first row. Row i has the vectors `offsets[i]..offsets[i + 1]`. A row
    /// without vectors has the score −10⁹. The result does not depend on the number of threads.
    ///
    /// # Shapes
    /// `vectors`: `(N, E)`; `offsets`: `(B + 1,)`
    /// # Errors
    /// [`InputError::NotFinite`] for a row with NaN or ∞.
    /// # Panics
    /// If the offsets decrease or exceed N.
    pub fn scan(&self, first: u64, vectors: VectorSlice, offsets: &[usize]) -> Result<Nearest> {
        let mut found = self.no_hits();
        for (query, (max_sim, count)) in self.queries.iter().enumerate() {
            let scores = max_sim.scores(vectors, offsets);
            for (row, score) in (first..).zip(scores) {
                if !score.is_finite() {
                    return Err(InputError::NotFinite { row }.into());
                }
                let score = self.similarity.of_max_sim(score, *count);
                found.push(query, Hit { row, score });
            }
        }
        Ok(found)
    }

    /// The result of a scan without rows.
    pub fn no_hits(&self) -> Nearest {
        Nearest::none(self.queries.len(), self.top)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_equal_a_full_sort_for_any_split_of_the_corpus() -> Result<()> {
        let dimension = 3;
        let number = |i: usize| ((i * 7919 + 13) % 7) as f32 - 3.0; // integers, so that many tie
        let vectors = |seed: usize, count: usize| {
            let values = (0..count * dimension).map(|i| number(i + 31 * seed)).collect();
            MultiVector::new(values, dimension)
        };
        let queries = [vectors(1, 4), vectors(2, 1)];
        let rows: Vec<MultiVector> = (0..500).map(|i| vectors(i, i * 5 % 4)).collect();
        let search = MultiVectorSearch::new(&queries, LateInteraction::MaxSim, 30)?;
        let scan = |first: usize, rows: &[MultiVector]| {
            let values: Vec<f32> = rows.iter().flat_map(|row| row.values().to_vec()).collect();
            let mut offsets = vec![0];
            rows.iter().for_each(|row| offsets.push(offsets[offsets.len() - 1] + row.len()));
            search.scan(first as u64, VectorSlice::F32(&values), &offsets)
        };
        let mut parts = search.no_hits();
        for (i, part) in rows.chunks(77).enumerate().rev() {
            parts.merge(scan(77 * i, part)?);
        }
        let hits = parts.into_hits();
        assert_eq!(hits, scan(0, &rows)?.into_hits());
        for (query, hits) in queries.iter().zip(hits) {
            let scores = LateInteraction::MaxSim.scores(query, &rows)?;
            let mut all: Vec<Hit> =
                (0..).zip(scores).map(|(row, score)| Hit { row, score }).collect();
            all.sort_by(|x, y| y.score.total_cmp(&x.score).then(x.row.cmp(&y.row)));
            all.truncate(30);
            assert_eq!(hits, all);
        }
        Ok(())
    }

    #[test]
    fn invalid_queries_and_rows_are_errors_that_name_them() -> Result<()> {
        let new = |queries: &[MultiVector]| {
            let search = MultiVectorSearch::new(queries, LateInteraction::MaxSim, 1);
            search.map(|_| ()).unwrap_err().to_string()
        };
        let one = MultiVector::new(vec![1.0, 2.0], 2);
        let error = new(&[one.clone(), MultiVector::new(vec![], 2)]);
        assert!(error.contains("query 1"), "{error}");
        let error = new(&[one.clone(), MultiVector::new(vec![1.0; 3], 3)]);
        assert!(error.contains("expected 2, got 3"), "{error}");
        let search = MultiVectorSearch::new(&[one], LateInteraction::MaxSim, 1)?;
        let error = search.scan(5, VectorSlice::F32(&[1.0, 1.0, f32::NAN, 0.0]), &[0, 1, 2]);
        assert!(error.unwrap_err().to_string().starts_with("row 6 "));
        Ok(())
    }
}
