//! Exact search of sparse vectors by dot product, with an inverted index in memory.
//!
//! For each dimension, the index lists the rows that have a value there. A query reads the lists of
//! its own dimensions only, in ascending order, and adds `query value · row value` to the score of
//! each row.

use rayon::prelude::*;

use super::{
    search::{Hit, Nearest},
    sparse_vector::SparseVector,
};
use crate::{InputError, Result};

/// Number of rows per block. The scores of a block take 64 KB, which fit into the cache of a core,
/// and the number of a row within its block fits into 16 bits.
const ROWS_PER_BLOCK: usize = 1 << 14;

/// An inverted index of the sparse vectors of a corpus.
///
/// # Units
/// The index takes 6 bytes per value, and 8 · (dimension + 1) bytes per block of 16,384 rows.
///
/// # Examples
/// ```
/// use encoder::{SparseIndexBuilder, SparseVector};
///
/// let mut rows = SparseIndexBuilder::new(9, 0); // rows 0 to 2
/// rows.push(&[1, 4], &[2.0, 3.0])?;
/// rows.push(&[0], &[7.0])?;
/// rows.push(&[4, 8], &[4.0, 1.0])?;
/// let mut more = SparseIndexBuilder::new(9, 3); // row 3
/// more.push(&[1, 8], &[2.0, 6.0])?;
/// let mut index = rows.build();
/// index.merge(more.build());
///
/// let query = SparseVector::new(vec![1, 4], vec![1.0, 0.5]);
/// let hits = &index.search(&[query], 10)?[0];
/// let hits: Vec<(u64, f32)> = hits.iter().map(|hit| (hit.row, hit.score)).collect();
/// assert_eq!(hits, [(0, 3.5), (2, 2.0), (3, 2.0)]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SparseIndex {
    dimension: usize,
    blocks: Vec<Block>,
}

/// The values of at most [`ROWS_PER_BLOCK`] consecutive rows, sorted by dimension, then by row.
#[derive(Clone, Debug)]
struct Block {
    /// The number of the first row in the corpus.
    first: u64,
    row_count: usize,
    /// The position of the first value of each dimension, and the number of values: dimension + 1
    /// numbers.
    starts: Vec<usize>,
    /// The row of each value, counted from `first`.
    rows: Vec<u16>,
    values: Vec<f32>,
}

/// Builds a [`SparseIndex`] from consecutive rows. Several parts of a corpus can be built in
/// parallel and joined by [`SparseIndex::merge`].
///
/// # Units
/// Until a block of 16,384 rows is complete, its values take 8 bytes each.
#[derive(Clone, Debug)]
pub struct SparseIndexBuilder {
    dimension: usize,
    blocks: Vec<Block>,
    /// The number of the first row of the incomplete block.
    first: u64,
    /// The rows of the incomplete block, one after another, and the end of each.
    indices: Vec<u32>,
    values: Vec<f32>,
    ends: Vec<usize>,
}

impl SparseIndexBuilder {
    /// A builder for the rows from number `first` of a corpus, with indices below `dimension`.
    pub fn new(dimension: usize, first: u64) -> Self {
        Self { dimension, blocks: vec![], first, indices: vec![], values: vec![], ends: vec![] }
    }

    /// Adds the next row.
    ///
    /// # Errors
    /// [`InputError::SparseRow`] if the numbers of indices and values differ, if the indices are
    /// not ascending or not below the dimension, or if a value is NaN or infinite.
    pub fn push(&mut self, indices: &[u32], values: &[f32]) -> Result<()> {
        SparseVector::check(indices, values, self.dimension).map_err(|source| {
            let row = self.first + self.ends.len() as u64;
            InputError::SparseRow { row, source }
        })?;
        self.indices.extend_from_slice(indices);
        self.values.extend_from_slice(values);
        self.ends.push(self.indices.len());
        if self.ends.len() == ROWS_PER_BLOCK {
            self.complete_block();
        }
        Ok(())
    }

    /// The index of the rows.
    pub fn build(mut self) -> SparseIndex {
        if !self.ends.is_empty() {
            self.complete_block();
        }
        SparseIndex { dimension: self.dimension, blocks: self.blocks }
    }

    /// Sorts the values of the block by dimension: a counting sort, which keeps the order of rows.
    fn complete_block(&mut self) {
        let mut starts = vec![0; self.dimension + 1];
        for &index in &self.indices {
            starts[index as usize] += 1;
        }
        let mut total = 0;
        for start in &mut starts {
            total += std::mem::replace(start, total);
        }
        let (mut rows, mut values) = (vec![0; total], vec![0.0; total]);
        let mut begin = 0;
        for (row, &end) in (0..).zip(&self.ends) {
            for (&index, &value) in self.indices[begin..end].iter().zip(&self.values[begin..end]) {
                let next = &mut starts[index as usize];
                (rows[*next], values[*next]) = (row, value);
                *next += 1;
            }
            begin = end;
        }
        // Each start is now the end of its dimension, which is the start of the next one.
        starts.rotate_right(1);
        starts[0] = 0;
        let row_count = self.ends.len();
        self.blocks.push(Block { first: self.first, row_count, starts, rows, values });
        self.first += row_count as u64;
        self.indices.clear();
        self.values.clear();
        self.ends.clear();
    }
}

impl SparseIndex {
    /// The number of rows.
    pub fn len(&self) -> u64 {
        self.blocks.iter().map(|block| block.row_count as u64).sum()
    }

    /// Whether the index has no rows.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Adds the rows of another part of the same corpus.
    ///
    /// # Panics
    /// If the dimensions differ.
    pub fn merge(&mut self, other: Self) {
        assert_eq!(self.dimension, other.dimension, "merge: the dimensions differ");
        for block in other.blocks {
            match self.blocks.last_mut() {
                Some(last) if last.is_continued_by(&block) => last.append(&block),
                _ => self.blocks.push(block),
            }
        }
    }

    /// The `top` rows with the highest dot products for each query, in descending order of the
    /// score, equal scores in ascending order of row. A row whose score is 0, such as one that has
    /// no index in common with the query, is no hit.
    ///
    /// # Numerics
    /// A score is the sum in f32 of the products in ascending order of their indices, as in
    /// [`SparseVector::dot`]. It does not depend on the number of threads.
    ///
    /// # Errors
    /// [`InputError::SparseQuery`] for a query that [`SparseIndexBuilder::push`] would refuse as a
    /// row; [`InputError::ScoreOverflow`] if a score exceeds the range of f32.
    pub fn search(&self, queries: &[SparseVector], top: usize) -> Result<Vec<Vec<Hit>>> {
        for (query, SparseVector { indices, values, .. }) in queries.iter().enumerate() {
            SparseVector::check(indices, values, self.dimension)
                .map_err(|source| InputError::SparseQuery { query, source })?;
        }
        let search = |query: &SparseVector| -> Result<Vec<Hit>> {
            let parts = self.blocks.par_iter().map(|block| block.search(query, top));
            let mut found = Nearest::none(1, top);
            for part in parts.collect::<Vec<_>>() {
                found.merge(part?);
            }
            Ok(found.into_hits().remove(0))
        };
        let hits: Vec<Result<Vec<Hit>>> = queries.par_iter().map(search).collect();
        hits.into_iter().collect()
    }
}

impl Block {
    /// Whether the rows of another block are the next ones, and both fit into one block.
    fn is_continued_by(&self, next: &Self) -> bool {
        self.first + self.row_count as u64 == next.first
            && self.row_count + next.row_count <= ROWS_PER_BLOCK
    }

    /// Adds the rows of the next block, for which [`Self::is_continued_by`] is true.
    fn append(&mut self, next: &Self) {
        let count = self.values.len() + next.values.len();
        let (mut rows, mut values) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut starts = Vec::with_capacity(self.starts.len());
        let own_rows = self.row_count as u16; // less than `ROWS_PER_BLOCK`
        for (own, more) in self.starts.windows(2).zip(next.starts.windows(2)) {
            starts.push(rows.len());
            rows.extend_from_slice(&self.rows[own[0]..own[1]]);
            rows.extend(next.rows[more[0]..more[1]].iter().map(|row| own_rows + row));
            values.extend_from_slice(&self.values[own[0]..own[1]]);
            values.extend_from_slice(&next.values[more[0]..more[1]]);
        }
        starts.push(rows.len());
        let row_count = self.row_count + next.row_count;
        *self = Self { first: self.first, row_count, starts, rows, values };
    }

    fn search(&self, query: &SparseVector, top: usize) -> Result<Nearest> {
        let mut scores = vec![0f32; self.row_count];
        for (&index, &weight) in query.indices.iter().zip(&query.values) {
            let range = self.starts[index as usize]..self.starts[index as usize + 1];
            for (&row, &value) in self.rows[range.clone()].iter().zip(&self.values[range]) {
                scores[usize::from(row)] += weight * value;
            }
        }
        let mut found = Nearest::none(1, top);
        for (row, &score) in (self.first..).zip(&scores) {
            if !score.is_finite() {
                return Err(InputError::ScoreOverflow { row }.into());
            }
            if score != 0.0 {
                found.push(0, Hit { row, score });
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;

    /// Vectors with values of −2, 0.5, 1 and 2, so that many scores are equal, and some are 0.
    fn vectors(count: usize, dimension: u32, seed: u64) -> Vec<SparseVector> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut vector = || {
            let indices: Vec<u32> = (0..dimension).filter(|_| random.random_bool(0.1)).collect();
            let values = indices.iter().map(|_| [-2.0, 0.5, 1.0, 2.0][random.random_range(0..4)]);
            SparseVector::new(indices.clone(), values.collect())
        };
        (0..count).map(|_| vector()).collect()
    }

    fn index(dimension: usize, first: u64, rows: &[SparseVector]) -> SparseIndex {
        let mut builder = SparseIndexBuilder::new(dimension, first);
        rows.iter().for_each(|row| builder.push(&row.indices, &row.values).unwrap());
        builder.build()
    }

    #[test]
    fn hits_equal_a_full_sort_for_any_split_of_the_corpus() {
        let (rows, queries) = (vectors(40_001, 37, 1), vectors(7, 37, 2));
        let whole = index(37, 100, &rows);
        assert_eq!((whole.len(), whole.blocks.len()), (40_001, 3));
        let hits = whole.search(&queries, 300).unwrap();
        let mut parts = index(37, 0, &[]);
        assert!(parts.is_empty());
        for (part, rows) in rows.chunks(7919).enumerate().rev() {
            parts.merge(index(37, 100 + 7919 * part as u64, rows));
        }
        assert_eq!(parts.search(&queries, 300).unwrap(), hits);
        for (query, hits) in queries.iter().zip(hits) {
            let all = (100..).zip(&rows).map(|(row, x)| Hit { row, score: query.dot(x) });
            let mut all: Vec<Hit> = all.filter(|hit| hit.score != 0.0).collect();
            all.sort_by(|x, y| y.score.total_cmp(&x.score).then(x.row.cmp(&y.row)));
            all.truncate(300);
            assert_eq!(hits, all);
            assert!(hits.windows(2).any(|pair| pair[0].score == pair[1].score), "no ties");
        }
    }

    #[test]
    fn invalid_rows_and_queries_are_errors() {
        let mut builder = SparseIndexBuilder::new(9, 5);
        builder.push(&[0, 8], &[1.0, f32::MAX]).unwrap();
        let mut push = |indices: &[u32], values: &[f32]| {
            builder.push(indices, values).unwrap_err().to_string()
        };
        let row = |problem: &str| format!("row 6 of the corpus: {problem}");
        assert_eq!(
            push(&[1, 2], &[1.0]),
            row("expected as many values as indices, got 2 indices and 1 values")
        );
        assert_eq!(
            push(&[3, 3], &[1.0; 2]),
            row("expected ascending indices, each once, got 3 after 3")
        );
        assert_eq!(push(&[9], &[1.0]), row("expected indices below 9 (the dimension), got 9"));
        assert_eq!(
            push(&[2, 4], &[1.0, f32::NAN]),
            row("expected finite values, got NaN at index 4")
        );
        let index = builder.build();
        let search = |query| index.search(&[SparseVector::default(), query], 1);
        let error = |query| search(query).unwrap_err().to_string();
        assert!(
            error(SparseVector::new(vec![4, 1], vec![1.0; 2])).starts_with("query 1: expected asc")
        );
        assert_eq!(
            error(SparseVector::new(vec![8], vec![2.0])),
            "the dot product of row 5 of the corpus and a query is not finite in f32: expected \
             smaller values"
        );
        assert_eq!(search(SparseVector::default()).unwrap(), [[], []]);
    }
}
