//! One layer of an encoder or a decoder: self-attention, in some decoders cross-attention, and a
//! feed-forward network, each with a residual connection.

use candle_core::{Module, Tensor};
use mha::{
    AttentionMask, AttentionOptions, CrossAttention, HeadWeights, KvCache, LoweredMask, Memory,
    SelfAttention,
};
use ops::Weights;

use crate::{
    EncoderConfig, InputError, NormPlacement, PositionWiseFeedForward, Result,
    block::{config::unsupported, norm::Norm},
};

/// Self-attention and a feed-forward network, each with a residual connection and a normalisation.
/// Between them, a layer of an encoder-decoder's decoder attends to the encoder's output.
///
/// Post-norm, as in BERT: `x ← norm(x + attention(x))`, then `x ← norm(x + ffn(x))`.
/// Pre-norm: `x ← x + attention(norm(x))`, then `x ← x + ffn(norm(x))`.
/// Both: `x ← x + norm(attention(norm(x)))`, then `x ← x + norm(ffn(norm(x)))`.
///
/// # Source
/// Vaswani et al. 2017, section 3.1, <https://arxiv.org/abs/1706.03762>; pre-norm: Xiong et al.
/// 2020, <https://arxiv.org/abs/2002.04745>.
///
/// # Examples
/// If all weights are 0, a pre-norm layer returns its input, because of its residual connections:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarBuilder;
/// use encoder::{EncoderConfig, EncoderLayer, NormPlacement};
/// use mha::AttentionMask;
///
/// let mut config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// config.norm.placement = NormPlacement::Pre;
/// let layer = EncoderLayer::new(&config, 0, VarBuilder::zeros(DType::F32, &Cpu))?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let y = layer.forward(&x, &AttentionMask::none())?;
/// assert_eq!(y.to_vec3::<f32>()?, x.to_vec3::<f32>()?);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    placement: NormPlacement,
    attention: SelfAttention,
    /// `None` in the first layer of a pre-norm encoder whose `first_attention_norm` is false.
    attention_norm: Option<Norm>,
    /// Cross-attention and the norm of its residual sum.
    cross: Option<(CrossAttention, Norm)>,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: Norm,
    /// The norms of the outputs of attention and feed-forward network, for
    /// [`NormPlacement::PreAndPost`].
    output_norms: Option<[Norm; 2]>,
}

/// The keys and values of the tokens before those of the input, in the form of one layer
/// ([`KvCache`], [`Memory`]) or of all layers.
#[derive(Default)]
pub(super) enum Preceding<'a, C, P> {
    /// No tokens precede the input.
    #[default]
    None,
    /// The keys and values of each sequence. A layer appends the keys and values of its input.
    Cache(&'a mut C),
    /// The keys and values of a prefix that all ragged sequences continue.
    Prefix(&'a P),
}

/// The tokens that a layer computes, and the keys and values that they attend to besides each other's.
#[derive(Default)]
pub(super) struct Context<'a> {
    /// The tokens whose output is computed, `(T,)` of u32; `None` for all tokens.
    pub(super) tokens: Option<&'a Tensor>,
    pub(super) preceding: Preceding<'a, KvCache, Memory>,
    /// The keys and values of an encoder's output, and its padding.
    pub(super) memory: Option<(&'a Memory, Option<&'a Tensor>)>,
    /// The weights of cross-attention to return.
    pub(super) memory_weights: HeadWeights,
}

/// The result of a layer.
pub(super) struct LayerOutput {
    pub(super) hidden: Tensor, // (B, T, E), of the tokens of the context
    /// The weights of self-attention that the options select.
    pub(super) weights: Option<Tensor>,
    /// The weights of cross-attention that [`Context::memory_weights`] selects.
    pub(super) memory_weights: Option<Tensor>,
}

impl EncoderLayer {
    /// Builds layer `layer` of an encoder from `attention`, `attention_norm`, `feed_forward` and
    /// `feed_forward_norm` in `weights`, from `attention_output_norm` and `feed_forward_output_norm`
    /// for [`NormPlacement::PreAndPost`], and from `cross_attention` and `cross_attention_norm` for
    /// a layer with cross-attention.
    ///
    /// A layer does not apply the positions, the attention windows and the causal mask of the
    /// config: [`Encoder`] passes them to its layers with the mask and the [`AttentionOptions`].
    ///
    /// [`Encoder`]: super::Encoder
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; [`crate::ConfigError::Unsupported`] for cross-attention in a layer that
    /// is not post-norm; the errors of [`EncoderConfig::check`].
    pub fn new<'a>(
        config: &EncoderConfig,
        layer: usize,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let (placement, attention) = (config.norm.placement, config.attention()?);
        let has_attention_norm =
            layer > 0 || placement == NormPlacement::Post || config.norm.first_attention_norm;
        let norm = |name| Norm::new(config, config.hidden_size, weights.pp(name));
        let has_cross = || weights.contains_tensor("cross_attention.query.weight");
        let cross = if config.cross_attention.unwrap_or_else(has_cross) {
            if placement != NormPlacement::Post {
                let got = format!("{placement:?}");
                unsupported("norm.placement", "Post, with cross-attention", &got)?;
            }
            let cross = CrossAttention::new(&attention, weights.pp("cross_attention"))?;
            Some((cross, norm("cross_attention_norm")?))
        } else {
            None
        };
        Ok(Self {
            placement,
            attention: SelfAttention::new(&attention, weights.pp("attention"))?,
            attention_norm: if has_attention_norm { Some(norm("attention_norm")?) } else { None },
            cross,
            feed_forward: PositionWiseFeedForward::new(config, weights.pp("feed_forward"))?,
            feed_forward_norm: norm("feed_forward_norm")?,
            output_norms: match placement {
                NormPlacement::PreAndPost => {
                    Some([norm("attention_output_norm")?, norm("feed_forward_output_norm")?])
                }
                NormPlacement::Post | NormPlacement::Pre => None,
            },
        })
    }

    /// The self-attention.
    pub(crate) fn attention(&self) -> &SelfAttention {
        &self.attention
    }

    /// The layer's output, for a layer without cross-attention.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`SelfAttention::forward`]; [`InputError::NoMemory`] if the layer has
    /// cross-attention.
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        Ok(self.forward_with(x, mask, AttentionOptions::default())?.0)
    }

    /// [`Self::forward`] with [`AttentionOptions`]. Also returns the attention weights that the
    /// options select.
    ///
    /// # Errors
    /// The errors of [`Self::forward`] and [`SelfAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mask = self.lower(x, mask, x.dim(1)?, 0)?;
        let output = self.forward_lowered(x, &mask, options, Context::default())?;
        Ok((output.hidden, output.weights))
    }

    /// The keys and values of cross-attention for an encoder's output `(B, S, E)`.
    ///
    /// # Errors
    /// [`InputError::NoCrossAttention`] if the layer has no cross-attention;
    /// [`crate::Error::Attention`] for a wrong shape.
    pub(super) fn memory(&self, encoder_output: &Tensor) -> Result<Memory> {
        match &self.cross {
            Some((cross, _)) => Ok(cross.memory(encoder_output)?),
            None => Err(InputError::NoCrossAttention.into()),
        }
    }

    /// The mask for [`Self::forward_lowered`] of `t` queries and the keys of inputs with the shape of
    /// `x`, `(B, S, E)`, after `preceding` other keys.
    pub(super) fn lower(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        t: usize,
        preceding: usize,
    ) -> Result<LoweredMask> {
        let (b, s, _e) = x.dims3()?;
        let heads = self.attention.attention().config().num_attention_heads;
        Ok(mask.lower([b, heads, t, preceding + s], x.dtype(), x.device())?)
    }

    /// [`Self::forward_with`] with a mask from [`Self::lower`]. All layers of an encoder that compute
    /// the same tokens can use it.
    ///
    /// For some tokens alone, the layer computes the keys and values of all tokens, and all else of
    /// these tokens; the mask is [`AttentionMask::for_queries_of`] them.
    ///
    /// # Errors
    /// The errors of [`SelfAttention::step_lowered`] and [`CrossAttention::forward_with`];
    /// [`InputError::NoMemory`] or [`InputError::NoCrossAttention`] if only one of the layer and
    /// `context` has cross-attention or a memory.
    pub(super) fn forward_lowered(
        &self,
        x: &Tensor,
        mask: &LoweredMask,
        options: AttentionOptions,
        context: Context,
    ) -> Result<LayerOutput> {
        let Context { tokens, preceding, memory, memory_weights } = context;
        let normed = match (&self.attention_norm, self.placement) {
            (Some(norm), NormPlacement::Pre | NormPlacement::PreAndPost) => norm.forward(x)?,
            _ => x.clone(),
        };
        let of_tokens = |x: &Tensor| match tokens {
            None => Ok(x.clone()),
            Some(tokens) => x.index_select(tokens, 1),
        };
        let (x, query) = (&of_tokens(x)?, of_tokens(&normed)?);
        let (mut attended, weights) = match preceding {
            Preceding::None => {
                let attention = self.attention.attention();
                attention.forward_lowered(&query, &normed, &normed, mask, options)?
            }
            Preceding::Cache(cache) => {
                self.attention.step_lowered(&normed, mask, cache, options)?
            }
            Preceding::Prefix(prefix) => {
                self.attention.forward_after(&query, &normed, mask, prefix, options)?
            }
        };
        if let Some([norm, _]) = &self.output_norms {
            attended = norm.forward(&attended)?;
        }
        let (hidden, memory_weights) = match (&self.attention_norm, self.placement) {
            (Some(norm), NormPlacement::Post) => {
                let x = norm.forward_sum(x, &attended)?; // (B, T, E)
                let (x, memory_weights) = self.attend_to_memory(x, memory, memory_weights)?;
                let transformed = self.feed_forward.forward(&x)?;
                (self.feed_forward_norm.forward_sum(&x, &transformed)?, memory_weights)
            }
            _ => {
                if memory.is_some() {
                    return Err(InputError::NoCrossAttention.into());
                }
                let (x, normed) = self.feed_forward_norm.forward_residual(x, &attended)?;
                let mut transformed = self.feed_forward.forward(&normed)?;
                if let Some([_, norm]) = &self.output_norms {
                    transformed = norm.forward(&transformed)?;
                }
                (ops::add(&x, &transformed)?, None)
            }
        };
        Ok(LayerOutput { hidden, weights, memory_weights })
    }

    /// `norm(x + cross_attention(x, memory))`, or `x` for a layer without cross-attention; also the
    /// weights that `weights` selects.
    fn attend_to_memory(
        &self,
        x: Tensor,
        memory: Option<(&Memory, Option<&Tensor>)>,
        weights: HeadWeights,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match (&self.cross, memory) {
            (Some((cross, norm)), Some((memory, padding))) => {
                let options = AttentionOptions::new().with_weights(weights);
                let (attended, weights) = cross.forward_with(&x, memory, padding, options)?;
                Ok((norm.forward_sum(&x, &attended)?, weights))
            }
            (None, None) => Ok((x, None)),
            (Some(_), None) => Err(InputError::NoMemory.into()),
            (None, Some(_)) => Err(InputError::NoCrossAttention.into()),
        }
    }
}
