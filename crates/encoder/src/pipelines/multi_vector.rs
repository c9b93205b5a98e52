//! Embeddings with a vector per token.

use ops::{MaxSim, VectorSlice};
use rayon::prelude::*;
use serde::{Serialize, Serializer, ser::SerializeSeq};

use crate::{Result, Row};

/// The vectors of a text, of most tokens one each. It serialises as a list of vectors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MultiVector {
    values: Vec<f32>,
    dimension: usize,
}

impl MultiVector {
    /// The vectors in `values`, one after another.
    ///
    /// # Panics
    /// If the length of `values` is not a multiple of `dimension`.
    pub fn new(values: Vec<f32>, dimension: usize) -> Self {
        assert!(
            values.is_empty() || values.len().is_multiple_of(dimension),
            "values: expected vectors of {dimension} values"
        );
        Self { values, dimension }
    }

    /// The length of each vector.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The number of vectors.
    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.dimension).unwrap_or(0)
    }

    /// Whether there are no vectors.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The vectors.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.dimension.max(1))
    }

    /// Vector `i`.
    ///
    /// # Panics
    /// If there are not more than `i` vectors.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.dimension..(i + 1) * self.dimension]
    }

    /// The values of the vectors, one vector after another.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// [`Self::values`] without a copy.
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }

    /// The vectors of both.
    pub(crate) fn concat(mut self, other: Self) -> Self {
        self.values.extend(other.values);
        Self { dimension: self.dimension.max(other.dimension), ..self }
    }
}

impl Row for MultiVector {
    fn values(&self) -> impl Iterator<Item = &f32> {
        self.values.iter()
    }
}

impl Serialize for MultiVector {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut rows = serializer.serialize_seq(Some(self.len()))?;
        self.rows().try_for_each(|row| rows.serialize_element(row))?;
        rows.end()
    }
}

crate::choices! {
    /// The score of a query and a document that have a vector per token.
    pub enum LateInteraction: "similarity function", default MaxSim {
        /// The sum over the query's vectors of the largest dot product with a vector of the document.
        MaxSim = "maxsim",
        /// The MaxSim divided by the number of the query's vectors.
        MeanMaxSim = "meanmaxsim",
    }
}

impl LateInteraction {
    /// The score of each document.
    ///
    /// # Errors
    /// [`ops::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    /// # Panics
    /// If a document has vectors of another length than the query.
    /// # Examples
    /// ```
    /// use encoder::{LateInteraction, MultiVector};
    ///
    /// let query = MultiVector::new(vec![1., 0., 0., 2.], 2);
    /// let documents = [vec![3., 1., -1., 0.5], vec![0., 1.]];
    /// let documents = documents.map(|values| MultiVector::new(values, 2));
    /// assert_eq!(LateInteraction::MaxSim.scores(&query, &documents)?, [5., 2.]);
    /// assert_eq!(LateInteraction::MeanMaxSim.scores(&query, &documents)?, [2.5, 1.]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn scores(self, query: &MultiVector, documents: &[MultiVector]) -> Result<Vec<f32>> {
        let max_sim = MaxSim::new(&query.values, query.dimension.max(1))?;
        let score = |document: &MultiVector| {
            assert!(
                document.is_empty() || query.is_empty() || document.dimension == query.dimension,
                "documents: expected vectors of {} values",
                query.dimension
            );
            let scores = max_sim.scores(VectorSlice::F32(&document.values), &[0, document.len()]);
            self.of_max_sim(scores[0], query.len())
        };
        Ok(documents.par_iter().map(score).collect())
    }

    /// The score of a query with `count` vectors from its MaxSim.
    pub fn of_max_sim(self, max_sim: f32, count: usize) -> f32 {
        match self {
            Self::MaxSim => max_sim,
            Self::MeanMaxSim => max_sim / count.max(1) as f32,
        }
    }
}
