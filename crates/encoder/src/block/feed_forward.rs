//! The position-wise feed-forward network: `activation(x·W₁ᵀ + b₁)·W₂ᵀ + b₂`, or the gated variant
//! `(activation(x·W₃ᵀ + b₃) ⊙ (x·W₁ᵀ + b₁))·W₂ᵀ + b₂`.
//! Vaswani et al. 2017, equation 2, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use ops::{Linear, Weights};

use crate::{Activation, EncoderConfig, FeedForwardKind, Result};

/// A linear map from E to F, an activation, and a linear map from F to E, applied to each token
/// separately. The gated variant has a second map from E to F, the gate: the activation of the gate
/// is multiplied by the output of the first map.
///
/// # Shapes
/// `(.., E)` to `(.., E)`, through F = `intermediate_size`
/// # Source
/// Vaswani et al. 2017, equation 2 (ReLU); Devlin et al. 2019 (GELU); Shazeer 2020 (gated),
/// <https://arxiv.org/abs/2002.05202>.
/// # Examples
/// `max(0, x·W₁ᵀ + b₁)·W₂ᵀ + b₂` with E = 1 and F = 2:
/// ```
/// use candle_core::{DType, Device::Cpu, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use encoder::{Activation, EncoderConfig, PositionWiseFeedForward};
///
/// let tensors = [
///     ("intermediate.weight", Tensor::new(&[[1f32], [-1.]], &Cpu)?),
///     ("intermediate.bias", Tensor::new(&[0f32, 1.], &Cpu)?),
///     ("output.weight", Tensor::new(&[[2f32, 3.]], &Cpu)?),
///     ("output.bias", Tensor::new(&[10f32], &Cpu)?),
/// ];
/// let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor)).into();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
/// let mut config = EncoderConfig::new(10, 1, 1, 1, 2); // vocabulary, E, layers, heads, F
/// config.feed_forward.activation = Activation::Relu;
/// let feed_forward = PositionWiseFeedForward::new(&config, vb)?;
///
/// let y = feed_forward.forward(&Tensor::new(&[[4f32], [-4.]], &Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[10. + 2. * 4. + 3. * 0.], [10. + 2. * 0. + 3. * 5.]]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PositionWiseFeedForward {
    intermediate: Linear,
    gate: Option<Linear>,
    activation: Activation,
    output: Linear,
}

impl PositionWiseFeedForward {
    /// Builds the module from `intermediate` `(F, E)` and `output` `(E, F)` in `weights`, and from
    /// `gate` `(F, E)` if the network is gated. Each map has a weight, and a bias if the config has
    /// it.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::check`]; [`mha::Error::Candle`] if `weights` lack a tensor or
    /// have it in another shape; [`ops::Error::ComputeType`] if the compute type does not support
    /// the weights' dtype or device; [`mha::Error::Shape`] for an int8 input wider than 65,536;
    /// [`ops::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new<'a>(config: &EncoderConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let (e, f) = (config.hidden_size, config.intermediate_size);
        let kind = config.feed_forward.kind;
        let (intermediate_bias, output_bias) =
            (config.feed_forward.intermediate_bias, config.feed_forward.output_bias);
        let linear = |input, output, bias, name| {
            Linear::load(config.compute_type, input, output, bias, weights.pp(name))
        };
        Ok(Self {
            intermediate: linear(e, f, intermediate_bias, "intermediate")?,
            gate: match kind {
                FeedForwardKind::Dense => None,
                FeedForwardKind::Gated => Some(linear(e, f, intermediate_bias, "gate")?),
            },
            activation: config.feed_forward.activation,
            output: linear(f, e, output_bias, "output")?,
        })
    }
}

impl Module for PositionWiseFeedForward {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let activation = Some(self.activation);
        match &self.gate {
            None => Ok(self.intermediate.forward_chain(x, activation, &self.output)?),
            Some(gate) => {
                Ok(gate.forward_gated(x, self.activation, &self.intermediate, &self.output)?)
            }
        }
    }
}
