//! The nearest of many vectors to each of some, exactly: every one of them is looked at.

use std::{cmp::Ordering, collections::BinaryHeap};

use mha_kernels::{Isa, cosine_similarities};
use rayon::prelude::*;

use crate::{Error, Result};

/// Rows that a thread takes at a time.
const ROWS: usize = 512;

/// The rows of a corpus that are nearest to each of some queries, by the cosine.
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
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Search {
    isa: Isa,
    /// `(Q, E)`
    queries: Vec<f32>,
    width: usize,
    top: usize,
    threshold: f32,
}

/// A row that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// Its number in the corpus.
    pub row: u64,
    /// The cosine of the angle between it and the query.
    pub score: f32,
}

/// The nearest rows of a part of the corpus, for each query.
#[derive(Clone, Debug)]
pub struct Nearest {
    top: usize,
    /// The worst of each on top.
    of_queries: Vec<BinaryHeap<Worst>>,
}

/// Ordered by how far they are, and of equals by where they are.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Worst(Hit);

impl Eq for Worst {}

impl Ord for Worst {
    fn cmp(&self, other: &Self) -> Ordering {
        let (Hit { row, score }, Hit { row: other_row, score: other_score }) = (self.0, other.0);
        other_score.total_cmp(&score).then(row.cmp(&other_row))
    }
}

impl PartialOrd for Worst {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Search {
    /// Looks for the `top` nearest rows to each query.
    ///
    /// # Shapes
    /// `queries`: Q of E numbers each
    /// # Errors
    /// [`Error::VectorWidth`] if they are not of one length; [`Error::Attention`] for a wrong
    /// `MHA_ISA`.
    pub fn new(queries: &[Vec<f32>], top: usize) -> Result<Self> {
        let width = queries.first().map_or(1, Vec::len).max(1);
        if let Some(other) = queries.iter().find(|query| query.len() != width) {
            return Err(Error::VectorWidth { expected: width, got: other.len() });
        }
        let queries = queries.concat();
        Ok(Self {
            isa: Isa::get().map_err(mha::Error::from)?,
            queries,
            width,
            top,
            threshold: f32::NEG_INFINITY,
        })
    }

    /// Leaves out rows whose cosine is below.
    pub fn with_threshold(self, threshold: f32) -> Self {
        Self { threshold, ..self }
    }

    /// The nearest among some rows of a corpus, the first of which is its row `first`. Parts can be
    /// scanned on as many threads as one likes: what is found does not depend on it.
    ///
    /// # Shapes
    /// `rows`: `(N, E)`
    /// # Errors
    /// [`Error::VectorWidth`] if they are no whole rows; [`Error::NotANumber`] for a row whose
    /// cosines are none.
    pub fn scan(&self, first: u64, rows: &[f32]) -> Result<Nearest> {
        if !rows.len().is_multiple_of(self.width) {
            let got = rows.len() % self.width;
            return Err(Error::VectorWidth { expected: self.width, got });
        }
        let parts = rows.par_chunks(ROWS * self.width).enumerate();
        let found = parts.map(|(part, rows)| self.scan_part(first + (part * ROWS) as u64, rows));
        found.try_reduce(
            || self.nothing(),
            |mut found, more| {
                found.merge(more);
                Ok(found)
            },
        )
    }

    /// What is found where there are no rows.
    pub fn nothing(&self) -> Nearest {
        let queries = self.queries.len() / self.width;
        Nearest { top: self.top, of_queries: vec![BinaryHeap::new(); queries] }
    }

    fn scan_part(&self, first: u64, rows: &[f32]) -> Result<Nearest> {
        let mut found = self.nothing();
        let scores = cosine_similarities(self.isa, rows, &self.queries, self.width);
        for (row, scores) in (first..).zip(scores.chunks(found.of_queries.len().max(1))) {
            for (query, &score) in scores.iter().enumerate() {
                if score.is_nan() {
                    return Err(Error::NotANumber { row });
                }
                if score >= self.threshold {
                    found.push(query, Hit { row, score });
                }
            }
        }
        Ok(found)
    }
}

impl Nearest {
    fn push(&mut self, query: usize, hit: Hit) {
        let heap = &mut self.of_queries[query];
        if heap.len() < self.top {
            heap.push(Worst(hit));
        } else if let Some(mut worst) = heap.peek_mut()
            && Worst(hit) < *worst
        {
            *worst = Worst(hit);
        }
    }

    /// With what was found of the same queries in another part.
    pub fn merge(&mut self, other: Self) {
        for (query, hits) in other.of_queries.into_iter().enumerate() {
            hits.into_iter().for_each(|Worst(hit)| self.push(query, hit));
        }
    }

    /// For each query its hits, the nearest first; of equals that of the lower row.
    pub fn into_hits(self) -> Vec<Vec<Hit>> {
        let sorted = self.of_queries.into_iter().map(BinaryHeap::into_sorted_vec);
        sorted.map(|hits| hits.into_iter().map(|Worst(hit)| hit).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sorting all of them, in whatever parts they come.
    #[test]
    fn what_is_found_is_what_sorting_finds() {
        let width = 5;
        let number = |i: usize| (((i * 7919 + 13) % 11) as f32 - 5.0) / 3.0; // with many equals
        let rows: Vec<f32> = (0..3000 * width).map(number).collect();
        let queries: Vec<Vec<f32>> =
            (0..3).map(|q| (0..width).map(|i| number(q * 31 + i)).collect()).collect();
        let search = Search::new(&queries, 40).unwrap().with_threshold(-0.2);
        let whole = search.scan(100, &rows).unwrap().into_hits();
        let mut parts = search.nothing();
        for (i, part) in rows.chunks(701 * width).enumerate().rev() {
            parts.merge(search.scan(100 + 701 * i as u64, part).unwrap());
        }
        assert_eq!(parts.into_hits(), whole);
        for (query, hits) in queries.iter().zip(whole) {
            let scores = cosine_similarities(Isa::get().unwrap(), &rows, query, width);
            let mut all: Vec<Hit> =
                (100..).zip(scores).map(|(row, score)| Hit { row, score }).collect();
            all.sort_by(|x, y| y.score.total_cmp(&x.score).then(x.row.cmp(&y.row)));
            all.retain(|hit| hit.score >= -0.2);
            all.truncate(40);
            assert_eq!(hits, all);
        }
    }

    #[test]
    fn what_is_no_vector_is_an_error() {
        let search = Search::new(&[vec![1.0, 0.0]], 1).unwrap();
        assert_eq!(
            search.scan(5, &[1.0, 0.0, f32::NAN, 0.0]).unwrap_err().to_string(),
            "row 6 of the corpus has no cosine: expected finite numbers"
        );
        assert_eq!(
            search.scan(0, &[1.0]).unwrap_err().to_string(),
            "vectors of 1 numbers: expected 2, as the queries have"
        );
        assert!(Search::new(&[vec![1.0], vec![1.0, 2.0]], 1).is_err());
        assert_eq!(search.scan(0, &[]).unwrap().into_hits(), [[]]);
    }
}
