//! Cross-attention: a decoder's tokens attend to an encoder's output, the memory.

use std::fmt;

use candle_core::Tensor;
use candle_nn::VarBuilder;

use crate::{AttentionConfig, AttentionMask, AttentionOptions, Memory, MultiHeadAttention, Result};

/// [`MultiHeadAttention`] whose queries come from one sequence, keys and values from another.
///
/// # Examples
/// 4 tokens of width 12 attend to 6 of width 20; the memory is projected once:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, CrossAttention};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let width = Some(20);
/// let config = AttentionConfig { kdim: width, vdim: width, ..AttentionConfig::new(12, 3) };
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
    /// The module whose tensors are in `vb`, as [`MultiHeadAttention::new`] names them.
    ///
    /// # Errors
    /// as there.
    pub fn new(config: &AttentionConfig, vb: VarBuilder) -> Result<Self> {
        Ok(Self(MultiHeadAttention::new(config, vb)?))
    }

    /// The core that it wraps.
    pub fn attention(&self) -> &MultiHeadAttention {
        &self.0
    }

    /// The keys and values of an encoder's output `(B, S, kdim)`, for as many calls as come.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if it is of another width.
    pub fn memory(&self, encoder_output: &Tensor) -> Result<Memory> {
        self.0.project_memory(encoder_output, encoder_output)
    }

    /// `x` `(B, T, E)` to `(B, T, E)`; `memory_padding` `(B, S)` of 0 and 1 hides parts of the
    /// memory.
    ///
    /// # Errors
    /// as [`MultiHeadAttention::forward`], [`AttentionMask::with_padding`].
    pub fn forward(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
    ) -> Result<Tensor> {
        let options = AttentionOptions::default();
        Ok(self.forward_with(x, memory, memory_padding, options)?.0)
    }

    /// [`Self::forward`], and the weights `(B, H, T, S)`.
    ///
    /// # Errors
    /// as there.
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let q = self.0.project_query(x)?;
        self.0.attend_with_weights(
            &q,
            memory,
            &AttentionMask::none().with_optional_padding(memory_padding)?,
        )
    }

    /// [`Self::forward`] with [`AttentionOptions`]: the weights of some heads, dropout.
    ///
    /// # Errors
    /// as [`MultiHeadAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        memory: &Memory,
        memory_padding: Option<&Tensor>,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let q = self.0.project_query(x)?;
        self.0.attend(
            &q,
            memory,
            &AttentionMask::none().with_optional_padding(memory_padding)?,
            options,
        )
    }
}

/// Such as one with pruned heads.
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
