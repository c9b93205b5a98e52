//! The pooling of a masked language model's logits to a sparse vector.

use ops::RowPooling;
use serde::Deserialize;

use crate::{Result, SparseVector};

/// How the logits of the tokens become a vector: the `config.json` of sentence-transformers'
/// `SpladePooling`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct SpladePooling {
    pooling_strategy: SpladeStrategy,
    activation_function: SpladeActivation,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SpladeStrategy {
    #[default]
    Max,
    Sum,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SpladeActivation {
    /// `ln(1 + max(x, 0))`
    #[default]
    Relu,
    /// `ln(1 + ln(1 + max(x, 0)))`
    Log1pRelu,
}

impl SpladePooling {
    pub(crate) fn rows(self) -> RowPooling {
        match (self.pooling_strategy, self.activation_function) {
            (SpladeStrategy::Max, _) => RowPooling::Max,
            (SpladeStrategy::Sum, SpladeActivation::Relu) => RowPooling::SumLog1p,
            (SpladeStrategy::Sum, SpladeActivation::Log1pRelu) => RowPooling::SumLog1pTwice,
        }
    }

    /// The value for a pooled logit above 0. The activation increases with the logit, so that it is
    /// applied to the maximum.
    fn value(self, pooled: f32) -> f32 {
        match (self.pooling_strategy, self.activation_function) {
            (SpladeStrategy::Sum, _) => pooled,
            (SpladeStrategy::Max, SpladeActivation::Relu) => libm::log1pf(pooled),
            (SpladeStrategy::Max, SpladeActivation::Log1pRelu) => {
                libm::log1pf(libm::log1pf(pooled))
            }
        }
    }

    /// The vector of a text from its pooled logits.
    ///
    /// # Errors
    /// [`crate::Error::NonFiniteOutput`] if a logit is NaN or infinite.
    pub(crate) fn vector(self, pooled: &[f32]) -> Result<SparseVector> {
        let mut vector = SparseVector::from_dense(pooled)?;
        vector.values.iter_mut().for_each(|value| *value = self.value(*value));
        Ok(vector)
    }
}
