//! Vectors of which most values are 0.

use serde::Serialize;

use crate::{Error, Result, Row, SparseVectorError};

/// A vector of which most values are 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SparseVector {
    /// The indices of the values that are not 0, ascending.
    pub indices: Vec<u32>,
    /// The value at each index.
    pub values: Vec<f32>,
    /// The token of each index, if
    /// [`SparseEmbedder::with_tokens`](crate::SparseEmbedder::with_tokens) asks for them; otherwise
    /// empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
}

impl Row for SparseVector {
    fn values(&self) -> impl Iterator<Item = &f32> {
        self.values.iter()
    }

    fn bytes(&self) -> usize {
        let words = self.tokens.iter().map(|word| size_of::<String>() + word.len());
        size_of_val(&self.indices[..]) + size_of_val(&self.values[..]) + words.sum::<usize>()
    }
}

impl SparseVector {
    /// A vector without tokens. `indices` must be ascending and as many as `values`; otherwise
    /// [`Self::dot`] has no meaning.
    pub fn new(indices: Vec<u32>, values: Vec<f32>) -> Self {
        Self { indices, values, tokens: vec![] }
    }

    /// Checks a vector of a file or of another program.
    ///
    /// # Errors
    /// [`SparseVectorError`] if the numbers of indices and values differ, if the indices are not
    /// ascending or not below `dimension`, or if a value is NaN or infinite.
    pub(crate) fn check(
        indices: &[u32],
        values: &[f32],
        dimension: usize,
    ) -> Result<(), SparseVectorError> {
        if indices.len() != values.len() {
            let (indices, values) = (indices.len(), values.len());
            return Err(SparseVectorError::Length { indices, values });
        }
        if let Some(pair) = indices.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(SparseVectorError::Order { previous: pair[0], got: pair[1] });
        }
        if let Some(&got) = indices.last().filter(|last| **last as usize >= dimension) {
            return Err(SparseVectorError::Index { got, dimension });
        }
        match indices.iter().zip(values).find(|(_, value)| !value.is_finite()) {
            Some((&index, &value)) => Err(SparseVectorError::NotFinite { index, value }),
            None => Ok(()),
        }
    }

    /// The values above 0 of a dense vector.
    ///
    /// # Errors
    /// [`Error::NonFiniteOutput`] if a value is NaN or infinite.
    pub(crate) fn from_dense(values: &[f32]) -> Result<Self> {
        if !values.iter().all(|value| value.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        let positive = (0..).zip(values).filter(|(_, value)| **value > 0.0);
        let (indices, values) = positive.unzip();
        Ok(Self::new(indices, values))
    }

    /// The sum of the products of the values that both vectors have.
    ///
    /// ```
    /// use encoder::SparseVector;
    ///
    /// let a = SparseVector::new(vec![1, 4], vec![2.0, 3.0]);
    /// let b = SparseVector::new(vec![0, 4], vec![5.0, 0.5]);
    /// assert_eq!(a.dot(&b), 1.5);
    /// ```
    pub fn dot(&self, other: &Self) -> f32 {
        let mut others = other.pairs().peekable();
        let mut sum = 0.0;
        for (index, value) in self.pairs() {
            while others.next_if(|(other, _)| *other < index).is_some() {}
            if let Some((_, other)) = others.next_if(|(other, _)| *other == index) {
                sum += value * other;
            }
        }
        sum
    }

    /// Each index with its value.
    fn pairs(&self) -> impl Iterator<Item = (u32, f32)> + '_ {
        self.indices.iter().copied().zip(self.values.iter().copied())
    }

    /// The largest value of both vectors at each index.
    pub(crate) fn max(&self, other: &Self) -> Self {
        let mut values: Vec<(u32, f32)> = [self, other].into_iter().flat_map(Self::pairs).collect();
        values.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
        values.dedup_by_key(|(index, _)| *index); // keeps the first, which is the largest
        let (indices, values) = values.into_iter().unzip();
        Self::new(indices, values)
    }

    /// The `count` values of the largest magnitude; of equal magnitudes those of the lowest
    /// indices.
    pub(crate) fn truncated(self, count: usize) -> Self {
        if self.indices.len() <= count {
            return self;
        }
        let mut order: Vec<usize> = (0..self.indices.len()).collect();
        let magnitude = |i: usize| self.values[i].abs();
        order.sort_by(|&a, &b| magnitude(b).total_cmp(&magnitude(a))); // stable
        order.truncate(count);
        order.sort_unstable();
        Self::new(
            order.iter().map(|&i| self.indices[i]).collect(),
            order.iter().map(|&i| self.values[i]).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_joined_by_their_largest_values_and_ties_go_to_the_lowest_index() {
        let vector =
            |indices: &[u32], values: &[f32]| SparseVector::new(indices.to_vec(), values.to_vec());
        let joined = vector(&[1, 5, 7], &[1.0, 2.0, 3.0]).max(&vector(&[5, 6], &[4.0, 2.0]));
        assert_eq!(joined, vector(&[1, 5, 6, 7], &[1.0, 4.0, 2.0, 3.0]));
        let limited = vector(&[1, 2, 3, 4], &[1.0, 2.0, 2.0, 2.0]).truncated(2);
        assert_eq!(limited, vector(&[2, 3], &[2.0, 2.0]));
    }
}
