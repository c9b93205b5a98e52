//! Cross-attention: a decoder's tokens attend to an encoder's output, the memory.

use std::fmt;

use candle_core::Tensor;
use ops::Weights;

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, Error, HeadWeights, Memory,
    MultiHeadAttention, Result, shape::shape_error,
};

/// [`MultiHeadAttention`] with queries from one sequence and keys and values from another.
///
/// # Examples
/// 4 tokens of width 12 attend to 6 tokens of width 20, whose keys and values are projected once:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, CrossAttention};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let config = AttentionConfig::new(12, 3).with_memory_widths(20, 20);
/// let attention = CrossAttention::new(&config, vb)?;
///
/// let encoder_output = Tensor::randn(0f32, 1., (1, 6, 20), &Cpu)?;
/// let memory = attention.memory(&encoder_output)?;
/// let x = Tensor::randn(0f32, 1., (1, 4, 12), &Cpu)?;
/// assert_eq!(attention.forward(&x, &memory, None)?.dims(), [1, 4, 12]);
/// let padding = Tensor::new(&[[1u8, 1, 0, 0, 0, 0]], &Cpu)?;
/// let (_, weights) = attention.forward_with_weights(&x, &memory, Some(&padding))?;
/// assert_eq!(weights.narrow(3, 2, 4)?.sum_all()?.to_scalar::<f32>()?, 0.0);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CrossAttention(MultiHeadAttention);

impl CrossAttention {
    /// Loads the module from `weights`, with the tensor names of [`MultiHeadAttention::new`].
    ///
    /// # Errors
    /// The errors of [`MultiHeadAttention::new`].
    pub fn new<'a>(config: &AttentionConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        Ok(Self(MultiHeadAttention::new(config, weights)?))
    }

    /// The wrapped module.
    pub fn attention(&self) -> &MultiHeadAttention {
        &self.0
    }

    /// Projects an encoder's output to keys and values, once for all calls of [`Self::forward`].
    ///
    /// # Shapes
    /// `encoder_output`: `(B, S, kdim)`; returns keys `(B, G, S, D)` and values `(B, G, S, V)`,
    /// where G is the number of key-value heads and V the width of a value head
    /// # Errors
    /// [`Error::Shape`] if `encoder_output` does not have three dimensions, or if its width differs
    /// from `kdim` or from `vdim` of the config; [`ops::Error::DType`] as in
    /// [`ops::Linear::forward`].
    pub fn memory(&self, encoder_output: &Tensor) -> Result<Memory> {
        let memory = self.0.project_memory(encoder_output, encoder_output, None);
        memory.map_err(|error| {
            let name = "encoder_output";
            error.with_argument("key", name).with_argument("value", name)
        })
    }

    /// Cross-attention from `x` to the memory. Of R rows of `x` for each sequence of the memory, as
    /// in beam search, the first R attend to the first sequence.
    ///
    /// # Shapes
    /// `x`: `(B·R, T, E)`; `memory_padding`: `(B, S)`, 0 hides a key; returns `(B·R, T, E)`
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward`] and [`AttentionMask::with_padding`].
    pub fn forward(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
    ) -> Result<Tensor> {
        let options = AttentionOptions::default();
        Ok(self.forward_with(x, memory, memory_padding, options)?.0)
    }

    /// [`Self::forward`] and the weights `(B·R, H, T, S)`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let options = AttentionOptions::new().with_weights(HeadWeights::All);
        let (output, weights) = self.forward_with(x, memory, memory_padding, options)?;
        Ok((output, weights.expect("the options select the weights of all heads")))
    }

    /// [`Self::forward`] with [`AttentionOptions`].
    ///
    /// # Shapes
    /// as [`Self::forward`]; also returns the weights that the options select, see
    /// [`crate::HeadWeights`]
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward_with`]; [`Error::Transform`] if `options`
    /// has a transformation of queries and keys, since [`Self::memory`] has already projected the
    /// keys.
    pub fn forward_with(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        if options.transform.is_some() {
            return Err(Error::Transform);
        }
        // No query depends on another, so the rows of a sequence are one row of queries.
        let rows = x.dims().first().copied().unwrap_or(0);
        let per_sequence = rows_per_sequence(rows, memory.sequences());
        let grouped = match (x.dims(), per_sequence) {
            (&[b, t, e], 2..) => &x.reshape((b / per_sequence, per_sequence * t, e))?,
            _ => x,
        };
        let q = self.query(grouped, memory)?;
        let mask = AttentionMask::none().with_optional_padding(memory_padding)?;
        let (output, weights) = self.0.attend(&q, memory, &memory.lower(&mask, &q)?, options)?;
        if per_sequence == 1 {
            return Ok((output, weights));
        }
        let ungrouped = |weights: Tensor| {
            let (b, h, rt, s) = weights.dims4()?; // T queries of each of R rows
            let (r, t) = (per_sequence, rt / per_sequence);
            let rows = weights.reshape((b, h, r, t, s))?.transpose(1, 2)?;
            rows.reshape((b * r, h, t, s))
        };
        Ok((output.reshape(x.dims())?, weights.map(ungrouped).transpose()?))
    }

    /// Projects the queries of `x`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the width of `x` is not E, or if `x` and the memory differ in the number
    /// of sequences.
    fn query(&self, x: &Tensor, memory: &Memory) -> Result<Tensor> {
        let q = self.0.project_query(x, None).map_err(Error::with_query_named_x)?; // (B, H, T, D)
        if memory.sequences() != q.dim(0)? {
            let expected =
                format!("(B, G, S, D), where B divides the {} sequences of x", q.dim(0)?);
            return Err(shape_error("memory", &memory.k, expected));
        }
        Ok(q)
    }
}

/// The number of rows of queries for each sequence of a memory; 1 if there is no such number.
fn rows_per_sequence(rows: usize, sequences: usize) -> usize {
    match rows.checked_div(sequences) {
        Some(per_sequence) if per_sequence > 1 && rows.is_multiple_of(sequences) => per_sequence,
        _ => 1,
    }
}

/// Wraps a module, for example after [`MultiHeadAttention::prune_heads`].
impl From<MultiHeadAttention> for CrossAttention {
    fn from(attention: MultiHeadAttention) -> Self {
        Self(attention)
    }
}

impl fmt::Display for CrossAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CrossAttention({})", self.0.config())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;

    #[test]
    fn rows_of_a_sequence_attend_to_it_as_to_copies_of_it() -> Result<()> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
        let attention = CrossAttention::new(&AttentionConfig::new(12, 3), vb)?;
        let memory = attention.memory(&Tensor::randn(0f32, 1., (2, 5, 12), &Cpu)?)?;
        let padding = Tensor::new(&[[1u8, 1, 1, 0, 0], [0, 1, 1, 1, 1]], &Cpu)?;
        let x = Tensor::randn(0f32, 1., (6, 4, 12), &Cpu)?;

        let copies = [0, 0, 0, 1, 1, 1];
        let index = Tensor::new(&copies, &Cpu)?;
        let copied = (memory.reorder(&copies)?, padding.index_select(&index, 0)?);
        let of = |memory, padding| attention.forward_with_weights(&x, memory, Some(padding));
        let (expected, expected_weights) = of(&copied.0, &copied.1)?;
        let (output, weights) = of(&memory, &padding)?;
        let without_weights = attention.forward(&x, &memory, Some(&padding))?;
        for (got, expected) in
            [(output, &expected), (without_weights, &expected), (weights, &expected_weights)]
        {
            assert_eq!(got.dims(), expected.dims());
            let difference = (got - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference < 1e-6, "{difference}");
        }

        let error = attention.forward(&x.narrow(0, 0, 5)?, &memory, None).unwrap_err().to_string();
        assert!(error.contains("B divides the 5 sequences of x"), "{error}");
        Ok(())
    }
}
