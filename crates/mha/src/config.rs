//! The sizes of an attention module, and the published ones by name.

use crate::{Error, Result};

/// Sizes of a multi-head attention module.
///
/// Plain values, checked when a module is built from them.
///
/// # Examples
/// ```
/// use mha::{AttentionConfig, ProjectionBias};
///
/// assert_eq!(AttentionConfig::BERT_BASE.head_dim(), 64);
/// assert_eq!(AttentionConfig::BERT_BASE.parameter_count(), 4 * 768 * 768 + 4 * 768);
///
/// let small = AttentionConfig { bias: ProjectionBias::NONE, ..AttentionConfig::new(100, 5) };
/// assert_eq!(small.head_dim(), 20);
/// assert_eq!(small.parameter_count(), 40_000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionConfig {
    /// E, the width of the hidden states, split evenly over the heads.
    pub hidden_size: usize,
    /// H, the number of heads.
    pub num_attention_heads: usize,
    /// Which of the four projections have a bias.
    pub bias: ProjectionBias,
}

/// Which of the four projections have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the four names say it
pub struct ProjectionBias {
    pub query: bool,
    pub key: bool,
    pub value: bool,
    pub output: bool,
}

impl ProjectionBias {
    /// A bias everywhere, as in BERT.
    pub const ALL: Self = Self { query: true, key: true, value: true, output: true };
    /// A bias nowhere, as in the original Transformer's equations.
    pub const NONE: Self = Self { query: false, key: false, value: false, output: false };

    fn count(self) -> usize {
        [self.query, self.key, self.value, self.output].into_iter().filter(|&b| b).count()
    }
}

impl AttentionConfig {
    /// The base model of Vaswani et al. 2017, table 3.
    pub const TRANSFORMER_BASE: Self = Self::new(512, 8);
    /// BERT-base, Devlin et al. 2019, section 3.
    pub const BERT_BASE: Self = Self::new(768, 12);
    /// BERT-large, Devlin et al. 2019, section 3.
    pub const BERT_LARGE: Self = Self::new(1024, 16);
    /// GPT-2 with 124 M parameters, Radford et al. 2019, table 2.
    pub const GPT2: Self = Self::new(768, 12);
    /// GPT-2 with 355 M parameters.
    pub const GPT2_MEDIUM: Self = Self::new(1024, 16);
    /// GPT-2 with 774 M parameters.
    pub const GPT2_LARGE: Self = Self::new(1280, 20);
    /// GPT-2 with 1.5 G parameters.
    pub const GPT2_XL: Self = Self::new(1600, 25);

    /// Attention of `hidden_size` over `num_attention_heads`, with biases.
    pub const fn new(hidden_size: usize, num_attention_heads: usize) -> Self {
        Self { hidden_size, num_attention_heads, bias: ProjectionBias::ALL }
    }

    /// D, the width of one head.
    pub const fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Number of weights and biases: `4·E²`, and `E` for each projection with a bias.
    pub fn parameter_count(&self) -> usize {
        4 * self.hidden_size * self.hidden_size + self.bias.count() * self.hidden_size
    }

    /// Checks that the sizes make a module.
    ///
    /// # Errors
    /// [`Error::Zero`] for a size of zero, [`Error::HeadsDoNotDivide`] where the heads cannot share
    /// `hidden_size` evenly.
    ///
    /// # Examples
    /// ```
    /// let error = mha::AttentionConfig::new(770, 12).check().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "hidden_size 770 is not divisible by num_attention_heads 12: \
    ///      expected a multiple of 12, got remainder 2"
    /// );
    /// ```
    pub fn check(&self) -> Result<()> {
        for (field, size) in
            [("hidden_size", self.hidden_size), ("num_attention_heads", self.num_attention_heads)]
        {
            if size == 0 {
                return Err(Error::Zero { field });
            }
        }
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(Error::HeadsDoNotDivide {
                hidden_size: self.hidden_size,
                num_attention_heads: self.num_attention_heads,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_heads_of_64() {
        for config in [
            AttentionConfig::TRANSFORMER_BASE,
            AttentionConfig::BERT_BASE,
            AttentionConfig::BERT_LARGE,
            AttentionConfig::GPT2,
            AttentionConfig::GPT2_MEDIUM,
            AttentionConfig::GPT2_LARGE,
            AttentionConfig::GPT2_XL,
        ] {
            config.check().unwrap();
            assert_eq!(config.head_dim(), 64, "{config:?}");
        }
    }

    #[test]
    fn zero_sizes_are_named() {
        let error = AttentionConfig::new(0, 12).check().unwrap_err();
        assert_eq!(error.to_string(), "hidden_size is zero: expected at least 1, got 0");
        let error = AttentionConfig::new(12, 0).check().unwrap_err();
        assert_eq!(error.to_string(), "num_attention_heads is zero: expected at least 1, got 0");
    }
}
