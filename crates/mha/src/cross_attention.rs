//! Cross-attention: a decoder's tokens attend to an encoder's output, the memory.

use std::fmt;

use candle_core::Tensor;
use ops::Weights;

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, Error, Memory, MultiHeadAttention, Result,
    shape::shape_error,
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

    /// Cross-attention from `x` to the memory.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; `memory_padding`: `(B, S)`, 0 hides a key; returns `(B, T, E)`
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

    /// [`Self::forward`] and the weights `(B, H, T, S)`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let q = self.query(x, memory)?;
        let mask = AttentionMask::none().with_optional_padding(memory_padding)?;
        self.0.attend_with_weights(&q, memory, &memory.lower(&mask, &q)?, None)
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
        let q = self.query(x, memory)?;
        let mask = AttentionMask::none().with_optional_padding(memory_padding)?;
        self.0.attend(&q, memory, &memory.lower(&mask, &q)?, options)
    }

    /// Projects the queries of `x`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the width of `x` is not E, or if `x` and the memory differ in the number
    /// of sequences.
    fn query(&self, x: &Tensor, memory: &Memory) -> Result<Tensor> {
        let q = self.0.project_query(x, None).map_err(Error::with_query_named_x)?; // (B, H, T, D)
        if memory.k.dim(0)? != q.dim(0)? {
            let expected = format!("(B, G, S, D) with B = {}, as x", q.dim(0)?);
            return Err(shape_error("memory", &memory.k, expected));
        }
        Ok(q)
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
