//! The sizes of an attention module, with constants for published models.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{ComputeType, Error, QueryKeyNorm, Result};

/// The maximum width of the input and the output of a projection, so that numbers of parameters do
/// not overflow.
const MAX_WIDTH: usize = 1 << 30;

/// Sizes of a multi-head attention module.
///
/// A struct of plain values; building a module checks them with [`AttentionConfig::check`].
///
/// # Examples
/// ```
/// use mha::{AttentionConfig, ProjectionBias};
///
/// assert_eq!(AttentionConfig::BERT_BASE.head_dim(), 64);
/// assert_eq!(AttentionConfig::BERT_BASE.parameter_count(), 4 * 768 * 768 + 4 * 768);
///
/// let small = AttentionConfig::new(100, 5).with_bias(ProjectionBias::NONE);
/// assert_eq!(small.head_dim(), 20);
/// assert_eq!(small.parameter_count(), 40_000);
///
/// // 8 heads in 2 groups that share keys and values: 512·512 weights for the queries and for the
/// // output, 512·128 for the keys and for the values.
/// let grouped = AttentionConfig::new(512, 8).with_key_value_heads(2);
/// let grouped = grouped.with_bias(ProjectionBias::NONE);
/// assert_eq!(grouped.parameter_count(), 2 * 512 * 512 + 2 * 512 * 128);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// E, the width of the queries' hidden states and of the output.
    pub hidden_size: usize,
    /// H, the number of heads.
    pub num_attention_heads: usize,
    /// G, the number of key-value heads: H, or a divisor of H if groups of H / G heads share keys
    /// and values (grouped-query attention), or 1 (multi-query attention).
    pub num_key_value_heads: usize,
    /// D, the width of a head's queries and keys; `None` means E / H.
    pub head_dim: Option<usize>,
    /// V, the width of a head's values; `None` means D.
    pub value_head_dim: Option<usize>,
    /// The width of the hidden states that keys are projected from; `None` means E.
    pub kdim: Option<usize>,
    /// The width of the hidden states that values are projected from; `None` means E.
    pub vdim: Option<usize>,
    /// Which of the four projections have a bias.
    pub bias: ProjectionBias,
    /// The factor of the raw scores; `None` means 1/√D.
    #[serde(default)]
    pub scale: Option<f64>,
    /// RMS normalisation over the D values of each head's queries and keys, after the projections
    /// and before the transformation of [`crate::AttentionOptions`].
    #[serde(default)]
    pub query_key_norm: Option<QueryKeyNorm>,
    /// The number format in which the projections multiply. It is not serialised, since the program
    /// that runs the model chooses it.
    #[serde(skip)]
    pub compute_type: ComputeType,
}

/// Which of the four projections have a bias.
///
/// # Examples
/// ```
/// use mha::{AttentionConfig, ProjectionBias};
///
/// let bias = ProjectionBias { key: false, ..ProjectionBias::ALL };
/// let config = AttentionConfig::new(8, 2).with_bias(bias);
/// assert_eq!(config.parameter_count(), 4 * 8 * 8 + 3 * 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the field names suffice
pub struct ProjectionBias {
    pub query: bool,
    pub key: bool,
    pub value: bool,
    pub output: bool,
}

impl ProjectionBias {
    /// All four projections have a bias, as in BERT.
    pub const ALL: Self = Self { query: true, key: true, value: true, output: true };
    /// No projection has a bias, as in the original Transformer's equations.
    pub const NONE: Self = Self { query: false, key: false, value: false, output: false };
}

impl AttentionConfig {
    /// The base model of Vaswani et al. 2017, table 3, with biases as in `torch.nn.Transformer`.
    pub const TRANSFORMER_BASE: Self = Self::new(512, 8);
    /// BERT-base, Devlin et al. 2019, section 3.
    pub const BERT_BASE: Self = Self::new(768, 12);
    /// BERT-large, Devlin et al. 2019, section 3.
    pub const BERT_LARGE: Self = Self::new(1024, 16);
    /// GPT-2 with 124 M parameters; table 2 of Radford et al. 2019 says 117 M.
    pub const GPT2: Self = Self::new(768, 12);
    /// GPT-2 with 355 M parameters; table 2 of Radford et al. 2019 says 345 M.
    pub const GPT2_MEDIUM: Self = Self::new(1024, 16);
    /// GPT-2 with 774 M parameters; table 2 of Radford et al. 2019 says 762 M.
    pub const GPT2_LARGE: Self = Self::new(1280, 20);
    /// GPT-2 with 1.5 billion parameters.
    pub const GPT2_XL: Self = Self::new(1600, 25);

    /// Attention with these sizes, a bias in each projection and f32 products.
    pub const fn new(hidden_size: usize, num_attention_heads: usize) -> Self {
        Self {
            hidden_size,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: None,
            value_head_dim: None,
            kdim: None,
            vdim: None,
            bias: ProjectionBias::ALL,
            scale: None,
            query_key_norm: None,
            compute_type: ComputeType::F32,
        }
    }

    /// This config with these biases.
    pub const fn with_bias(self, bias: ProjectionBias) -> Self {
        Self { bias, ..self }
    }

    /// This config with `num_key_value_heads` heads of keys and values: grouped-query attention.
    pub const fn with_key_value_heads(self, num_key_value_heads: usize) -> Self {
        Self { num_key_value_heads, ..self }
    }

    /// This config with keys projected from hidden states of width `kdim`, and values from hidden
    /// states of width `vdim`.
    pub const fn with_memory_widths(self, kdim: usize, vdim: usize) -> Self {
        Self { kdim: Some(kdim), vdim: Some(vdim), ..self }
    }

    /// This config with raw scores that are multiplied by `scale`.
    pub const fn with_scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// This config with normalised queries and keys.
    pub const fn with_query_key_norm(self, norm: QueryKeyNorm) -> Self {
        Self { query_key_norm: Some(norm), ..self }
    }

    /// This config with linear maps that multiply in `compute_type`.
    pub const fn with_compute_type(self, compute_type: ComputeType) -> Self {
        Self { compute_type, ..self }
    }

    /// D, the width of a head's queries and keys. If the field `head_dim` is `None`, D is E / H, or
    /// 0 if H is 0.
    pub const fn head_dim(&self) -> usize {
        match self.head_dim {
            Some(head_dim) => head_dim,
            None if self.num_attention_heads == 0 => 0,
            None => self.hidden_size / self.num_attention_heads,
        }
    }

    /// V, the width of a head's values.
    pub const fn value_head_dim(&self) -> usize {
        match self.value_head_dim {
            Some(value_head_dim) => value_head_dim,
            None => self.head_dim(),
        }
    }

    /// Whether queries, keys and values are projected from hidden states of width E, and a head's
    /// values have the width of its keys.
    pub(crate) fn has_one_width(&self) -> bool {
        let e = self.hidden_size;
        [self.kdim, self.vdim].into_iter().flatten().all(|dim| dim == e)
            && self.head_dim() == self.value_head_dim()
    }

    /// The input and output widths of the four projections.
    pub(crate) fn projections(&self) -> [Projection; 4] {
        let (e, h, kv) = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads);
        let (d, value_d) = (self.head_dim(), self.value_head_dim());
        let (kdim, vdim) = (self.kdim.unwrap_or(e), self.vdim.unwrap_or(e));
        let bias = self.bias;
        let projection = |name, input, output, bias| Projection { name, input, output, bias };
        [
            projection("query", e, h * d, bias.query),
            projection("key", kdim, kv * d, bias.key),
            projection("value", vdim, kv * value_d, bias.value),
            projection("output", h * value_d, e, bias.output),
        ]
    }

    /// Number of weights and biases: `4·E² + 4·E` if all widths are E and all projections have a
    /// bias, and `2·D` more if queries and keys are normalised. The sizes must have passed [`Self::check`]; otherwise the number can overflow.
    pub fn parameter_count(&self) -> usize {
        let count = |p: Projection| p.input * p.output + if p.bias { p.output } else { 0 };
        let of_norms = if self.query_key_norm.is_some() { 2 * self.head_dim() } else { 0 };
        self.projections().map(count).iter().sum::<usize>() + of_norms
    }

    /// Checks that the sizes are consistent and the numbers in range.
    ///
    /// # Errors
    /// [`Error::Zero`] if a size is zero; [`Error::TooLarge`] if the input or the output of a
    /// projection is wider than 2³⁰; [`Error::HeadsDoNotDivide`] if `head_dim` is `None` and
    /// `hidden_size` is not a multiple of `num_attention_heads`; [`Error::GroupsDoNotDivide`] if
    /// `num_attention_heads` is not a multiple of `num_key_value_heads`; [`Error::Value`] if `scale`
    /// is not positive and finite, or if ε of `query_key_norm` is negative or not finite.
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
        let (num_attention_heads, num_key_value_heads) =
            (self.num_attention_heads, self.num_key_value_heads);
        for (field, size) in [
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", num_attention_heads),
            ("num_key_value_heads", num_key_value_heads),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("value_head_dim", self.value_head_dim.unwrap_or(1)),
            ("kdim", self.kdim.unwrap_or(1)),
            ("vdim", self.vdim.unwrap_or(1)),
        ] {
            if size == 0 {
                return Err(Error::Zero { field });
            }
        }
        let hidden_size = self.hidden_size;
        if self.head_dim.is_none() && !hidden_size.is_multiple_of(num_attention_heads) {
            return Err(Error::HeadsDoNotDivide { hidden_size, num_attention_heads });
        }
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(Error::GroupsDoNotDivide { num_attention_heads, num_key_value_heads });
        }
        let all_heads = |width| num_attention_heads.saturating_mul(width);
        for (field, got) in [
            ("hidden_size", hidden_size),
            ("num_attention_heads · head_dim", all_heads(self.head_dim())),
            ("num_attention_heads · value_head_dim", all_heads(self.value_head_dim())),
            ("kdim", self.kdim.unwrap_or(1)),
            ("vdim", self.vdim.unwrap_or(1)),
        ] {
            if got > MAX_WIDTH {
                return Err(Error::TooLarge { field, got, max: MAX_WIDTH });
            }
        }
        if let Some(got) = self.scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            return Err(Error::Value { field: "scale", expected: "a positive number", got });
        }
        let eps = self.query_key_norm.map(|norm| norm.eps);
        if let Some(got) = eps.filter(|eps| !(eps.is_finite() && *eps >= 0.0)) {
            let expected = "0 or a small positive number";
            return Err(Error::Value { field: "eps of query_key_norm", expected, got });
        }
        Ok(())
    }
}

/// The name and the sizes of one of the four linear maps.
pub(crate) struct Projection {
    pub(crate) name: &'static str,
    pub(crate) input: usize,
    pub(crate) output: usize,
    pub(crate) bias: bool,
}

/// `hidden_size 768, 12 heads of 64`, followed by the number of key-value heads and the widths that
/// are not at their defaults.
impl fmt::Display for AttentionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (h, kv, d) = (self.num_attention_heads, self.num_key_value_heads, self.head_dim());
        write!(f, "hidden_size {}, {h} heads of {d}", self.hidden_size)?;
        if kv != h {
            write!(f, ", {kv} key-value heads")?;
        }
        if self.value_head_dim() != d {
            write!(f, ", value heads of {}", self.value_head_dim())?;
        }
        for (name, dim) in [("kdim", self.kdim), ("vdim", self.vdim)] {
            if let Some(dim) = dim.filter(|&dim| dim != self.hidden_size) {
                write!(f, ", {name} {dim}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_heads_of_width_64() {
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
    fn an_error_names_the_zero_size() {
        let error = AttentionConfig::new(0, 12).check().unwrap_err();
        assert_eq!(error.to_string(), "hidden_size is zero: expected at least 1, got 0");
        let error = AttentionConfig::new(12, 0).check().unwrap_err();
        assert_eq!(error.to_string(), "num_attention_heads is zero: expected at least 1, got 0");
    }

    #[test]
    fn a_scale_or_an_epsilon_out_of_range_is_an_error() {
        let config = AttentionConfig::new(12, 3);
        for scale in [0.0, -0.5, f64::NAN, f64::INFINITY] {
            let error = config.with_scale(scale).check().unwrap_err().to_string();
            assert_eq!(error, format!("scale {scale} is invalid: expected a positive number"));
        }
        for eps in [-1e-6, f64::NAN, f64::INFINITY] {
            let norm = QueryKeyNorm { eps, unit_offset: false };
            let error = config.with_query_key_norm(norm).check().unwrap_err().to_string();
            let expected = "is invalid: expected 0 or a small positive number";
            assert_eq!(error, format!("eps of query_key_norm {eps} {expected}"));
        }
    }
}
