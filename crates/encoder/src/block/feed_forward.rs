//! The position-wise feed-forward network, `activation(x·W₁ + b₁)·W₂ + b₂`, or gated:
//! Vaswani et al. 2017, equation 2, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::Linear;

use crate::{Activation, EncoderConfig, FeedForwardKind, Result};

/// A linear map to F, an activation and a linear map back, applied to each token by itself. A gated
/// network multiplies the activation of a second map, the gate, with the first.
///
/// # Shapes
/// `(.., E)` to `(.., E)`, through F = `intermediate_size`
/// # Source
/// Vaswani et al. 2017, equation 2 (ReLU); Devlin et al. 2019 (GELU); Shazeer 2020 (gated),
/// <https://arxiv.org/abs/2002.05202>.
/// # Examples
/// `max(0, x·W₁ + b₁)·W₂ + b₂` with E = 1 and F = 2:
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
    /// The module whose `intermediate` `(F, E)`, `output` `(E, F)` and, if it is gated, `gate`
    /// `(F, E)` are in `vb`, each a weight and, as the config says, a bias.
    ///
    /// # Errors
    /// [`mha::Error::Candle`] for a tensor that `vb` lacks or has in another shape;
    /// [`mha::Error::ComputeType`] for weights that the compute type does not take.
    pub fn new(config: &EncoderConfig, vb: VarBuilder) -> Result<Self> {
        let (e, f) = (config.hidden_size, config.intermediate_size);
        let kind = config.feed_forward.kind;
        let (inner, outer) =
            (config.feed_forward.intermediate_bias, config.feed_forward.output_bias);
        let linear = |input, output, bias, name| {
            Linear::load(config.compute_type, input, output, bias, vb.pp(name))
        };
        Ok(Self {
            intermediate: linear(e, f, inner, "intermediate")?,
            gate: match kind {
                FeedForwardKind::Dense => None,
                FeedForwardKind::Gated => Some(linear(e, f, inner, "gate")?),
            },
            activation: config.feed_forward.activation,
            output: linear(f, e, outer, "output")?,
        })
    }
}

impl Module for PositionWiseFeedForward {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let activation = Some(self.activation);
        match &self.gate {
            None => Ok(self.intermediate.forward_chain(x, activation, &self.output)?),
            Some(gate) => {
                let gated =
                    gate.forward_activated(x, activation)? * self.intermediate.forward(x)?;
                Ok(self.output.forward(&gated?)?)
            }
        }
    }
}
