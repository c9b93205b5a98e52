//! The position-wise feed-forward network, `activation(x·W₁ + b₁)·W₂ + b₂`:
//! Vaswani et al. 2017, equation 2, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::Linear;

use crate::{Activation, BertConfig, Result};

/// Two linear maps with an activation between them, applied to each token alone.
///
/// # Shapes
/// `(.., E)` to `(.., E)`, through F = `intermediate_size`
/// # Source
/// Vaswani et al. 2017, equation 2 (ReLU); Devlin et al. 2019 (GELU).
/// # Examples
/// `max(0, x·W₁ + b₁)·W₂ + b₂` with E = 1 and F = 2:
/// ```
/// use candle_core::{DType, Device::Cpu, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use encoder::{Activation, BertConfig, PositionWiseFeedForward};
///
/// let tensors = [
///     ("intermediate.weight", Tensor::new(&[[1f32], [-1.]], &Cpu)?),
///     ("intermediate.bias", Tensor::new(&[0f32, 1.], &Cpu)?),
///     ("output.weight", Tensor::new(&[[2f32, 3.]], &Cpu)?),
///     ("output.bias", Tensor::new(&[10f32], &Cpu)?),
/// ];
/// let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor)).into();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
/// let config = BertConfig {
///     hidden_size: 1,
///     intermediate_size: 2,
///     hidden_act: Activation::Relu,
///     ..BertConfig::bert_base()
/// };
/// let feed_forward = PositionWiseFeedForward::new(&config, vb)?;
///
/// let y = feed_forward.forward(&Tensor::new(&[[4f32], [-4.]], &Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[10. + 2. * 4. + 3. * 0.], [10. + 2. * 0. + 3. * 5.]]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PositionWiseFeedForward {
    intermediate: Linear,
    activation: Activation,
    output: Linear,
}

impl PositionWiseFeedForward {
    /// The module whose `intermediate` `(F, E)` and `output` `(E, F)`, each with weight and bias,
    /// are in `vb`.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let (e, f, compute_type) =
            (config.hidden_size, config.intermediate_size, config.compute_type);
        Ok(Self {
            intermediate: Linear::load(compute_type, e, f, true, vb.pp("intermediate"))?,
            activation: config.hidden_act,
            output: Linear::load(compute_type, f, e, true, vb.pp("output"))?,
        })
    }
}

impl Module for PositionWiseFeedForward {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.intermediate.forward_chain(x, Some(self.activation), &self.output)?)
    }
}
