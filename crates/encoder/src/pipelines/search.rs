//! Exact nearest-neighbour search by cosine similarity: every row of the corpus is compared.

use std::{cmp::Ordering, collections::BinaryHeap};

use ops::CosineKernel;
use rayon::prelude::*;

use crate::{InputError, Result};

/// Number of rows per parallel task.
const ROWS: usize = 512;

/// Finds the rows of a corpus with the highest cosine similarity to each query.
///
/// # Examples
/// ```
/// use encoder::Search;
///
/// let search = Search::new(&[vec![1., 0.], vec![0., -2.]], 2)?;
/// let mut nearest = search.scan(0, &[3., 4., 1., 0.1, -1., -0.1])?; // rows 0 to 2
/// nearest.merge(search.scan(3, &[0., -1.])?);
/// let hits = nearest.into_hits();
/// assert_eq!(hits[0].iter().map(|hit| hit.row).collect::<Vec<_>>(), [1, 0]);
/// assert!((hits[0][1].score - 0.6).abs() < 1e-6);
/// assert_eq!((hits[1][0].row, hits[1][0].score), (3, 1.0));
/// assert_eq!(search.query_width(), Some(2));
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Search {
    kernel: CosineKernel,
    /// The values of the Q queries of length E, `(Q, E)`.
    queries: Vec<f32>,
    width: usize,
    top: usize,
    threshold: f32,
}

/// A row of the corpus among the best for a query.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The index of the row in the corpus.
    pub row: u64,
    /// The cosine similarity of the row and the query, or the score of another search.
    pub score: f32,
}

/// The nearest rows to each query, of the rows scanned so far.
#[derive(Clone, Debug)]
pub struct Nearest {
    top: usize,
    /// One heap per query, with the lowest-ranked hit on top.
    heaps: Vec<BinaryHeap<Ranked>>,
}

/// A hit with the order of the results: `a < b` if a comes before b, because a has the higher
/// score, or the same score and the lower row number. The top of a max-heap is the last result.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ranked(Hit);

impl Eq for Ranked {}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        let (Hit { row, score }, Hit { row: other_row, score: other_score }) = (self.0, other.0);
        other_score.total_cmp(&score).then(row.cmp(&other_row))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Search {
    /// A search for the `top` nearest rows to each query.
    ///
    /// # Shapes
    /// `queries`: Q vectors of length E
    /// # Errors
    /// [`InputError::QueryWidth`] if the queries differ in length; [`InputError::EmptyQuery`] for a
    /// query without values; [`InputError::QueryValue`] for a query with NaN or ∞;
    /// [`ops::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new(queries: &[Vec<f32>], top: usize) -> Result<Self> {
        if let Some(query) = queries.iter().position(Vec::is_empty) {
            return Err(InputError::EmptyQuery { query }.into());
        }
        let width = queries.first().map_or(1, Vec::len);
        if let Some(query) = queries.iter().position(|query| query.len() != width) {
            return Err(InputError::QueryWidth {
                query,
                expected: width,
                got: queries[query].len(),
            }
            .into());
        }
        for (query, values) in queries.iter().enumerate() {
            if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
                return Err(InputError::QueryValue { query, value }.into());
            }
        }
        let queries = queries.concat();
        Ok(Self { kernel: CosineKernel::new()?, queries, width, top, threshold: f32::NEG_INFINITY })
    }

    /// The length E of the queries; `None` if there are none.
    pub fn query_width(&self) -> Option<usize> {
        (!self.queries.is_empty()).then_some(self.width)
    }

    /// Excludes rows with a cosine below `threshold`.
    pub fn with_threshold(self, threshold: f32) -> Self {
        Self { threshold, ..self }
    }

    /// The nearest of `rows` to each query. `rows` are consecutive rows of the corpus; `first` is
    /// the index of the first row. The result does not depend on the number of threads.
    ///
    /// # Shapes
    /// `rows`: `(N, E)`
    /// # Errors
    /// [`InputError::VectorWidth`] if the length of `rows` is not a multiple of E;
    /// [`InputError::NotFinite`] for a row with NaN or ∞.
    pub fn scan(&self, first: u64, rows: &[f32]) -> Result<Nearest> {
        if !rows.len().is_multiple_of(self.width) {
            let got = rows.len() % self.width;
            return Err(InputError::VectorWidth { expected: self.width, got }.into());
        }
        let parts = rows.par_chunks(ROWS * self.width).enumerate();
        let found: Vec<Result<Nearest>> =
            parts.map(|(part, rows)| self.scan_part(first + (part * ROWS) as u64, rows)).collect();
        // In order, so that an error names the first invalid row.
        found.into_iter().try_fold(self.no_hits(), |mut found, more| {
            found.merge(more?);
            Ok(found)
        })
    }

    /// The result of a scan without rows.
    pub fn no_hits(&self) -> Nearest {
        Nearest::none(self.queries.len() / self.width, self.top)
    }

    fn scan_part(&self, first: u64, rows: &[f32]) -> Result<Nearest> {
        let mut found = self.no_hits();
        let scores = self.kernel.cosines(rows, &self.queries, self.width);
        for (row, scores) in (first..).zip(scores.chunks(found.heaps.len().max(1))) {
            for (query, &score) in scores.iter().enumerate() {
                if score.is_nan() {
                    return Err(InputError::NotFinite { row }.into());
                }
                // Rounding can give a cosine just above 1.
                let score = score.clamp(-1.0, 1.0);
                if score >= self.threshold {
                    found.push(query, Hit { row, score });
                }
            }
        }
        Ok(found)
    }
}

impl Nearest {
    /// No hits yet of each query, of which `top` will be kept.
    pub(super) fn none(queries: usize, top: usize) -> Self {
        Self { top, heaps: vec![BinaryHeap::new(); queries] }
    }

    pub(super) fn push(&mut self, query: usize, hit: Hit) {
        let heap = &mut self.heaps[query];
        if heap.len() < self.top {
            heap.push(Ranked(hit));
        } else if let Some(mut lowest) = heap.peek_mut()
            && Ranked(hit) < *lowest
        {
            *lowest = Ranked(hit);
        }
    }

    /// Adds the hits of another scan by the same [`Search`]. The hits of another search with the
    /// same number of queries are added without an error.
    ///
    /// # Panics
    /// If the numbers of queries differ.
    pub fn merge(&mut self, other: Self) {
        assert_eq!(
            self.heaps.len(),
            other.heaps.len(),
            "merge: the numbers of queries differ: expected hits of the same search"
        );
        for (query, hits) in other.heaps.into_iter().enumerate() {
            hits.into_iter().for_each(|Ranked(hit)| self.push(query, hit));
        }
    }

    /// The hits of each query in descending order of score, equal scores in ascending order of row.
    pub fn into_hits(self) -> Vec<Vec<Hit>> {
        let sorted = self.heaps.into_iter().map(BinaryHeap::into_sorted_vec);
        sorted.map(|hits| hits.into_iter().map(|Ranked(hit)| hit).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_equal_a_full_sort_for_any_split_of_the_corpus() {
        let width = 5;
        let number = |i: usize| (((i * 7919 + 13) % 11) as f32 - 5.0) / 3.0; // with many ties
        let rows: Vec<f32> = (0..3000 * width).map(number).collect();
        let queries: Vec<Vec<f32>> =
            (0..3).map(|q| (0..width).map(|i| number(q * 31 + i)).collect()).collect();
        let search = Search::new(&queries, 40).unwrap().with_threshold(-0.2);
        let whole = search.scan(100, &rows).unwrap().into_hits();
        let mut parts = search.no_hits();
        for (i, part) in rows.chunks(701 * width).enumerate().rev() {
            parts.merge(search.scan(100 + 701 * i as u64, part).unwrap());
        }
        assert_eq!(parts.into_hits(), whole);
        for (query, hits) in queries.iter().zip(whole) {
            let scores = CosineKernel::new().unwrap().cosines(&rows, query, width);
            let hit = |(row, score): (u64, f32)| Hit { row, score: score.clamp(-1.0, 1.0) };
            let mut all: Vec<Hit> = (100..).zip(scores).map(hit).collect();
            all.sort_by(|x, y| y.score.total_cmp(&x.score).then(x.row.cmp(&y.row)));
            all.retain(|hit| hit.score >= -0.2);
            all.truncate(40);
            assert_eq!(hits, all);
        }
    }

    #[test]
    fn no_score_exceeds_1() {
        let row =
            |i: u32| -> Vec<f32> { (0..7).map(|j| ((i * 37 + j * 11) % 101) as f32).collect() };
        let rows: Vec<Vec<f32>> = (1..200).map(row).collect();
        let hits = Search::new(&rows, 1).unwrap().scan(0, &rows.concat()).unwrap().into_hits();
        let scores: Vec<f32> = hits.iter().map(|hits| hits[0].score).collect();
        assert!(scores.iter().all(|score| (0.999999..=1.0).contains(score)), "{scores:?}");
    }

    #[test]
    fn rows_with_nan_or_of_another_width_are_errors() {
        let search = Search::new(&[vec![1.0, 0.0]], 1).unwrap();
        assert_eq!(
            search.scan(5, &[1.0, 0.0, f32::NAN, 0.0]).unwrap_err().to_string(),
            "row 6 of the corpus contains NaN or infinity: expected finite numbers"
        );
        assert_eq!(
            search.scan(0, &[1.0]).unwrap_err().to_string(),
            "a vector has length 1: expected 2, the length of each query"
        );
        assert_eq!(
            Search::new(&[vec![1.0], vec![1.0, 2.0]], 1).map(|_| ()).unwrap_err().to_string(),
            "query 1 and query 0 differ in their number of values: expected 1, got 2"
        );
        let mut rows = vec![1.0; 2 * 3 * ROWS];
        (rows[0], rows[4 * ROWS]) = (f32::NAN, f32::NAN);
        for _ in 0..20 {
            let error = search.scan(0, &rows).unwrap_err().to_string();
            assert!(error.starts_with("row 0 "), "{error}");
        }
        assert_eq!(search.scan(0, &[]).unwrap().into_hits(), [[]]);
    }
}
