//! The stack of the L layers of an encoder or a decoder, with an optional normalisation at the end.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use candle_core::{Device, Module, Tensor};
use mha::{
    AttentionMask, AttentionOptions, HeadWeights, KvCache, LoweredMask, RelativeBias, Rotary,
    RotaryAt,
};
use ops::Weights;

use crate::{
    DecoderAttentions, DecoderCache, DecoderMemory, EncoderConfig, EncoderLayer, InputError,
    Positions, RelativeBiasConfig, Result, RotaryPositions,
    block::{
        config::distinct,
        decoder_state::Prefix,
        layer::{Context, LayerOutput, Preceding},
        norm::Norm,
        relative_embeddings::RelativeEmbeddings,
    },
};

/// A stack of [`EncoderLayer`]s. It applies no dropout.
///
/// # Examples
/// The hidden states of a sequence do not depend on the other sequences of its batch:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarMap;
/// use encoder::{Encoder, EncoderConfig};
/// use mha::{AttentionMask, Init};
///
/// let config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// let init = Init::Bert { initializer_range: 0.5 };
/// let encoder = Encoder::new(&config, init.var_builder(&VarMap::new(), 1, DType::F32, &Cpu))?;
///
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?; // sequences of 2 and 3 tokens
/// let ragged = encoder.forward(&x, &AttentionMask::none().with_sequences(&[0, 2, 5])?)?;
/// let alone = encoder.forward(&x.narrow(1, 0, 2)?, &AttentionMask::none())?;
/// let is_close = (ragged.narrow(1, 0, 2)? - alone)?.abs()?.lt(1e-5)?; // 0 for NaN
/// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Encoder {
    /// L layers, or a single one if all layers share weights.
    layers: Vec<EncoderLayer>,
    num_hidden_layers: usize,
    causal: bool,
    /// The attention window of each layer.
    windows: Vec<Option<usize>>,
    final_norm: Option<Norm>,
    relative_bias: Option<RelativeBias>,
    relative_embeddings: Option<RelativeEmbeddings>,
    /// With ALiBi, the biases of all distances: `(H, 2·R + 1)`, where R is `max_tokens − 1`.
    alibi: Option<Tensor>,
    /// The distinct rotations of the layers.
    rotary: Vec<Rotary>,
    /// The index in `rotary` for each layer; empty without rotary positions.
    rotary_of_layer: Vec<usize>,
    /// Maximum number of tokens of a sequence, if there is a table of distances or of rotations.
    max_tokens: Option<usize>,
}

/// The tokens whose hidden states after the last layer are read.
#[derive(Clone, Debug)]
pub(crate) struct ReadTokens {
    /// Indices in ascending order.
    tokens: Arc<[usize]>,
    index: Tensor, // the same, (T,) of u32
}

impl ReadTokens {
    /// `tokens`, which are in ascending order, for hidden states on this device.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the index cannot be created.
    pub(crate) fn new(tokens: &[usize], device: &Device) -> Result<Self> {
        let index = Tensor::from_iter(tokens.iter().map(|&token| token as u32), device)?;
        Ok(Self { tokens: tokens.into(), index })
    }

    /// Their indices in ascending order.
    pub(crate) fn tokens(&self) -> &[usize] {
        &self.tokens
    }
}

/// The arguments of a pass besides the hidden states and their mask: the tokens that are read after
/// the last layer, the keys and values before those of the hidden states, and an encoder's output.
#[derive(Default)]
struct Inputs<'a> {
    /// `None` if all tokens are read.
    read: Option<&'a ReadTokens>,
    preceding: Preceding<'a, DecoderCache, Prefix>,
    memory: Option<&'a DecoderMemory>,
}

impl Encoder {
    /// Builds the stack from `layer.0`, `layer.1` and so on in `weights`, and from `final_norm`,
    /// `relative_bias` and `relative_positions` if the config has them. If the layers share
    /// weights, all are built from `layer.0`.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::check`] and [`EncoderLayer::new`].
    pub fn new<'a>(config: &EncoderConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let num_hidden_layers = config.num_hidden_layers;
        let (rotary, rotary_of_layer) = match &config.positions {
            Positions::Rotary(of_layers) => distinct(of_layers),
            _ => Default::default(),
        };
        let d = config.attention()?.head_dim();
        let rotary = rotary.iter().map(|&RotaryPositions { theta, scaling }| {
            Rotary::scaled(theta, scaling, d, config.max_tokens(), weights.device())
        });
        let (heads, radius) = (config.num_attention_heads, config.max_tokens() - 1);
        let stored_layers = if config.shares_layers { 1 } else { num_hidden_layers };
        let layers =
            (0..stored_layers).map(|i| EncoderLayer::new(config, i, weights.pp("layer").pp(i)));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let relative_embeddings = match &config.disentangled {
            Some(disentangled) => {
                let weights = weights.pp("relative_positions");
                Some(RelativeEmbeddings::new(config, disentangled, layers.len(), weights)?)
            }
            None => None,
        };
        Ok(Self {
            layers,
            relative_embeddings,
            num_hidden_layers,
            causal: config.causal,
            relative_bias: match config.relative_bias {
                Some(RelativeBiasConfig { num_buckets, max_distance }) => {
                    let weights = weights.pp("relative_bias");
                    Some(RelativeBias::new(num_buckets, max_distance, heads, radius, weights)?)
                }
                None => None,
            },
            alibi: match config.positions {
                Positions::Alibi => Some(mha::alibi(heads, radius, weights.device())?),
                _ => None,
            },
            rotary: rotary.collect::<mha::Result<_>>()?,
            rotary_of_layer,
            max_tokens: config.uses_tables().then(|| config.max_tokens()),
            windows: (0..num_hidden_layers).map(|i| config.window(i)).collect(),
            final_norm: if config.norm.final_norm {
                Some(Norm::new(config, config.hidden_size, weights.pp("final_norm"))?)
            } else {
                None
            },
        })
    }

    /// The hidden states after the last layer.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`, or ragged sequences `(1, N, E)` with their
    /// [mask](AttentionMask::with_sequences); returns the same shape
    /// # Errors
    /// [`InputError::TooLong`] for a sequence of more than [`EncoderConfig::max_tokens`] tokens if
    /// the positions are rotary, ALiBi, relative or disentangled; the errors of
    /// [`EncoderLayer::forward`].
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        self.forward_with(x, mask, |_| HeadWeights::None, |_, _| ())
    }

    /// [`Self::forward`] that also calls `visit` after each layer, with the layer's output
    /// `(B, T, E)` and the attention weights that `select(i)` selects for layer `i`. The last
    /// output includes the final normalisation.
    ///
    /// # Shapes
    /// as [`Self::forward`]
    /// # Errors
    /// The errors of [`Self::forward`] and [`EncoderLayer::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        select: impl Fn(usize) -> HeadWeights,
        mut visit: impl FnMut(&Tensor, Option<Tensor>),
    ) -> Result<Tensor> {
        let mask = if self.causal { mask.clone().with_causal(0) } else { mask.clone() };
        let visit = |output: LayerOutput| visit(&output.hidden, output.weights);
        self.run(x, mask, Inputs::default(), select, visit)
    }

    /// The keys and values of tokens with which several sequences begin, for
    /// [`Self::forward_ragged`].
    ///
    /// # Shapes
    /// `x`: `(1, P, E)`, at least one token
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn prefix(&self, x: &Tensor) -> Result<Prefix> {
        let tokens = x.dim(1)?;
        let mask = AttentionMask::causal(0).with_sequences(&[0, tokens])?;
        let mut cache = self.cache(tokens);
        let inputs = Inputs { preceding: Preceding::Cache(&mut cache), ..Inputs::default() };
        self.run(x, mask, inputs, |_| HeadWeights::None, |_| ())?;
        let layers = cache.layers.iter().map(KvCache::to_memory);
        let layers = layers.collect::<mha::Result<Option<_>>>()?;
        Ok(Prefix { layers: layers.expect("each layer has appended the tokens") })
    }

    /// The hidden states of ragged sequences after the last layer, for some or all tokens. Each
    /// sequence continues `prefix` if there is one, for a config with
    /// [`EncoderConfig::shares_prefixes`].
    ///
    /// # Shapes
    /// `x`: `(1, N, E)`, the tokens after the prefix, with their
    /// [mask](AttentionMask::with_sequences_after); returns `(1, T, E)`, where T is the number of the
    /// tokens that are read
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn forward_ragged(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        read: Option<&ReadTokens>,
        prefix: Option<&Prefix>,
    ) -> Result<Tensor> {
        let offset = prefix.map_or(0, Prefix::len);
        let mask = if self.causal { mask.clone().with_causal(offset) } else { mask.clone() };
        let preceding = prefix.map_or(Preceding::None, Preceding::Prefix);
        let inputs = Inputs { read, preceding, memory: None };
        self.run(x, mask, inputs, |_| HeadWeights::None, |_| ())
    }

    /// An empty cache for at most `capacity` tokens per sequence.
    pub(crate) fn cache(&self, capacity: usize) -> DecoderCache {
        DecoderCache { layers: vec![KvCache::new(capacity); self.num_hidden_layers], longest: 0 }
    }

    /// Computes the keys and values of an encoder's output for cross-attention.
    ///
    /// # Shapes
    /// `encoder_output`: `(B, S, E)`; `padding`: `(B, S)`, 0 hides a token
    /// # Errors
    /// [`InputError::NoCrossAttention`] if the layers have no cross-attention;
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] for a wrong shape.
    pub(crate) fn memory(
        &self,
        encoder_output: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<DecoderMemory> {
        if let Some(padding) = padding {
            let (b, s, _) = encoder_output.dims3()?;
            if padding.dims() != [b, s] {
                let expected = format!("(B, S) = [{b}, {s}]");
                let (argument, got) = ("padding", padding.dims().to_vec());
                return Err(mha::Error::Shape { argument, expected, got }.into());
            }
        }
        let layers = (0..self.num_hidden_layers).map(|i| self.layer(i).memory(encoder_output));
        Ok(DecoderMemory { layers: layers.collect::<Result<_>>()?, padding: padding.cloned() })
    }

    /// The hidden states of tokens that follow those in `cache`. Each token attends to itself and
    /// to the tokens before it. The new tokens are added to the cache; after an error it is
    /// unchanged.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`, the T new tokens; returns `(B, T, E)`
    /// - `padding`: `(B, P + T)`, where P is the number of tokens in the cache; 0 hides a token
    /// # Errors
    /// - [`InputError::NoMemory`] or [`InputError::NoCrossAttention`] if only one of the layers and
    ///   the arguments has cross-attention or a memory
    /// - [`InputError::OtherDecoder`] for a cache or a memory with another number of layers
    /// - [`InputError::TooLong`] as in [`Self::forward`], and for rotary frequencies that depend on
    ///   the length of a sequence: they would change those of the keys in the cache
    /// - the errors of [`SelfAttention::step_lowered`](mha::SelfAttention::step_lowered)
    pub(crate) fn step(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        self.check_layers("cache", cache.layers.len())?;
        let (len, total) = (cache.len(), cache.len() + x.dim(1)?);
        let trained = self.rotary.iter().filter_map(Rotary::trained).min();
        let longest = if len == 0 { total } else { cache.longest.max(total) };
        if let Some(max) = trained.filter(|&max| len > 0 && longest > max) {
            return Err(InputError::TooLong { got: longest, max }.into());
        }
        let mask = AttentionMask::causal(len).with_optional_padding(padding)?;
        let none = |_| HeadWeights::None;
        let preceding = Preceding::Cache(&mut *cache);
        let hidden = self.run(x, mask, Inputs { read: None, preceding, memory }, none, |_| ());
        match &hidden {
            Ok(_) => cache.longest = longest,
            Err(_) => cache.truncate(len), // some layers may have added the tokens
        }
        hidden
    }

    /// The hidden states of whole sequences, in which each token attends to itself and to the tokens
    /// before it, and all attention weights.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; `padding`: `(B, T)`, 0 hides a token; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`Self::step`].
    pub(crate) fn forward_causal_with_attentions(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
    ) -> Result<(Tensor, DecoderAttentions)> {
        let mask = AttentionMask::causal(0).with_optional_padding(padding)?;
        let mut attentions = DecoderAttentions::default();
        let all = |_| HeadWeights::All;
        let inputs = Inputs { memory, ..Inputs::default() };
        let hidden = self.run(x, mask, inputs, all, |output| {
            attentions.causal.extend(output.weights);
            attentions.cross.extend(output.memory_weights);
        })?;
        Ok((hidden, attentions))
    }

    /// Runs all layers. `visit` gets the output of each; that of the last layer includes the final
    /// normalisation.
    fn run(
        &self,
        x: &Tensor,
        mut mask: AttentionMask,
        inputs: Inputs,
        select: impl Fn(usize) -> HeadWeights,
        mut visit: impl FnMut(LayerOutput),
    ) -> Result<Tensor> {
        let Inputs { read, mut preceding, memory } = inputs;
        let (b, t, _e) = x.dims3()?;
        if let Some(memory) = memory {
            self.check_layers("memory", memory.layers.len())?;
        }
        if let Some(max) = self.max_tokens
            && let Some(last) =
                mask.positions(t)?.into_iter().max().filter(|&last| last as usize >= max)
        {
            return Err(InputError::TooLong { got: last as usize + 1, max }.into());
        }
        let relative_bias = self.relative_bias.as_ref().map(RelativeBias::forward).transpose()?;
        for table in relative_bias.iter().chain(&self.alibi) {
            let table = columns_in_use(table, &mask, t)?;
            mask = mask.with_distance_bias(&table)?;
        }
        let rotations = |mask: &AttentionMask, t: usize| -> mha::Result<Vec<RotaryAt>> {
            self.rotary.iter().map(|rotary| rotary.of_mask(mask, b, t)).collect()
        };
        let of_all = rotations(&mask, t)?;
        let preceding_keys = match &preceding {
            Preceding::None => 0,
            Preceding::Cache(cache) => cache.len(),
            Preceding::Prefix(prefix) => mask.ragged_sequences() * prefix.len(),
        };
        let lower = |mask: &AttentionMask, window: Option<usize>, t: usize| {
            let windowed = window.map(|radius| mask.clone().with_window(radius));
            self.layers[0].lower(x, windowed.as_ref().unwrap_or(mask), t, preceding_keys)
        };
        // The mask of each distinct window of the layers.
        let mut masks: HashMap<Option<usize>, LoweredMask> = HashMap::new();
        let last = self.num_hidden_layers - 1;
        let whole = if read.is_some() { last } else { last + 1 }; // layers that compute all tokens
        for &window in &self.windows[..whole] {
            if let Entry::Vacant(entry) = masks.entry(window) {
                entry.insert(lower(&mask, window, t)?);
            }
        }
        // The rotations of the queries in the last layer, and its mask.
        let (mut of_read, mut mask_of_read) = (vec![], None);
        if let Some(ReadTokens { tokens, .. }) = read {
            let mask = mask.for_queries_of(tokens)?;
            of_read = rotations(&mask, tokens.len())?;
            mask_of_read = Some(lower(&mask, self.windows[last], tokens.len())?);
        }
        let mut x = x.clone();
        for i in 0..self.num_hidden_layers {
            let weights = select(i);
            let read = read.filter(|_| i == last);
            let context = Context {
                tokens: read.map(|read| &read.index),
                preceding: match &mut preceding {
                    Preceding::None => Preceding::None,
                    Preceding::Cache(cache) => Preceding::Cache(&mut cache.layers[i]),
                    Preceding::Prefix(prefix) => Preceding::Prefix(&prefix.layers[i]),
                },
                memory: memory.map(|memory| memory.layer(i)),
                memory_weights: weights.clone(),
            };
            let mut options = AttentionOptions::new().with_weights(weights);
            if let Some(&rotation) = self.rotary_of_layer.get(i) {
                options = options.with_transform(&of_all[rotation]);
                if let Some(rotation) = of_read.get(rotation).filter(|_| i == last) {
                    options = options.with_query_transform(rotation);
                }
            }
            let layer = self.layer(i);
            let positions = match &self.relative_embeddings {
                Some(embeddings) => Some(embeddings.of_layer(i % self.layers.len(), layer)?),
                None => None,
            };
            if let Some(positions) = &positions {
                options = options.with_disentangled(positions);
            }
            let mask = mask_of_read.as_ref().filter(|_| i == last);
            let mask = mask.unwrap_or_else(|| &masks[&self.windows[i]]);
            let mut output = layer.forward_lowered(&x, mask, options, context)?;
            if let Some(norm) = &self.final_norm
                && i == last
            {
                output.hidden = norm.forward(&output.hidden)?;
            }
            x = output.hidden.clone();
            visit(output);
        }
        Ok(x)
    }

    /// Layer `i` of the stack. All are the same one if they share weights.
    fn layer(&self, i: usize) -> &EncoderLayer {
        &self.layers[i % self.layers.len()]
    }

    /// Checks the number of layers of a cache or memory.
    fn check_layers(&self, what: &'static str, got: usize) -> Result<()> {
        match self.num_hidden_layers {
            expected if expected == got => Ok(()),
            expected => Err(InputError::OtherDecoder { what, got, expected }.into()),
        }
    }
}

/// The columns of `table` `(H, 2·R + 1)` for the distances that occur in rows of `t` tokens with
/// this mask. The full table is much longer than most sequences, and each layer would read all of
/// it.
fn columns_in_use(table: &Tensor, mask: &AttentionMask, t: usize) -> Result<Tensor> {
    let longest = mask.positions(t)?.into_iter().max().unwrap_or(0) as usize;
    let radius = table.dim(1)? / 2;
    let needed = longest.min(radius);
    Ok(table.narrow(1, radius - needed, 2 * needed + 1)?.contiguous()?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::{D, DType, Device::Cpu};
    use candle_nn::VarBuilder;
    use candle_nn::VarMap;

    use super::*;
    use crate::{Activation, FeedForwardKind, NormKind, NormPlacement};

    type Tensors = HashMap<String, Tensor>;

    /// A small config, an encoder with trainable weights, and the weights by name.
    fn encoder(
        configure: impl Fn(&mut EncoderConfig),
    ) -> Result<(EncoderConfig, Encoder, Tensors)> {
        let mut config = EncoderConfig::new(10, 12, 3, 2, 20);
        config.norm.eps = 1e-5;
        configure(&mut config);
        let vars = VarMap::new();
        let init = mha::Init::Bert { initializer_range: 0.3 };
        let encoder = Encoder::new(&config, init.var_builder(&vars, 1, DType::F32, &Cpu))?;
        let tensors = vars.data().lock().unwrap();
        let tensors = tensors.iter().map(|(name, var)| (name.clone(), var.as_tensor().detach()));
        let tensors: Tensors = tensors.collect();
        let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Cpu);
        Encoder::new(&config, vb)?; // needs no other tensors
        Ok((config, encoder, tensors))
    }

    /// The encoder's output, computed with candle's operations and [`mha::reference::attention`].
    fn reference(config: &EncoderConfig, tensors: &Tensors, x: &Tensor) -> Result<Tensor> {
        let get = |name: String| tensors.get(&name).cloned();
        let linear = |name: &str, x: &Tensor| -> Result<Tensor> {
            let y = x.broadcast_matmul(&tensors[&format!("{name}.weight")].t()?)?;
            match get(format!("{name}.bias")) {
                Some(bias) => Ok(y.broadcast_add(&bias)?),
                None => Ok(y),
            }
        };
        let norm = |name: &str, x: &Tensor| -> Result<Tensor> {
            let Some(weight) = get(format!("{name}.weight")) else { return Ok(x.clone()) };
            let centred = match config.norm.kind {
                NormKind::RmsNorm { .. } => x.clone(),
                _ => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
            };
            let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
            let y = centred.broadcast_div(&(variance + config.norm.eps)?.sqrt()?)?;
            let y = y.broadcast_mul(&weight)?;
            match get(format!("{name}.bias")) {
                Some(bias) => Ok(y.broadcast_add(&bias)?),
                None => Ok(y),
            }
        };
        let (b, t, e) = x.dims3()?;
        let h = config.num_attention_heads;
        let mut x = x.clone();
        for i in 0..config.num_hidden_layers {
            let layer = format!("layer.{}", if config.shares_layers { 0 } else { i });
            let attention = |x: &Tensor| -> Result<Tensor> {
                let heads = ["query", "key", "value"].map(|name| {
                    let y = linear(&format!("{layer}.attention.{name}"), x).unwrap();
                    let y = y.reshape((b, t, h, e / h)).unwrap().transpose(1, 2).unwrap();
                    y.contiguous().unwrap()
                });
                let near = |query: usize, key: usize| {
                    config.window(i).is_none_or(|radius| query.abs_diff(key) <= radius)
                };
                let keep = (0..t * t).map(|j| u8::from(near(j / t, j % t)));
                let keep = Tensor::from_iter(keep, &Cpu)?.reshape((t, t))?;
                let [q, k, v] = &heads;
                let (context, _) = mha::reference::attention(q, k, v, Some(&keep), None)?;
                let context = context.transpose(1, 2)?.flatten_from(2)?;
                linear(&format!("{layer}.attention.output"), &context)
            };
            let feed_forward = |x: &Tensor| -> Result<Tensor> {
                let map = |name| linear(&format!("{layer}.feed_forward.{name}"), x);
                let activation = config.feed_forward.activation;
                let inner = match config.feed_forward.kind {
                    FeedForwardKind::Dense => activation.forward(&map("intermediate")?)?,
                    FeedForwardKind::Gated => {
                        (activation.forward(&map("gate")?)? * map("intermediate")?)?
                    }
                };
                linear(&format!("{layer}.feed_forward.output"), &inner)
            };
            let norms = ["attention_norm", "feed_forward_norm"].map(|n| format!("{layer}.{n}"));
            x = match config.norm.placement {
                NormPlacement::Post => {
                    let x = norm(&norms[0], &(&x + attention(&x)?)?)?;
                    norm(&norms[1], &(&x + feed_forward(&x)?)?)?
                }
                NormPlacement::Pre | NormPlacement::PreAndPost => {
                    // `norm` returns its input if the encoder has no such norm.
                    let [attended, transformed] =
                        ["attention", "feed_forward"].map(|n| format!("{layer}.{n}_output_norm"));
                    let x = (&x + norm(&attended, &attention(&norm(&norms[0], &x)?)?)?)?;
                    (&x + norm(&transformed, &feed_forward(&norm(&norms[1], &x)?)?)?)?
                }
            };
        }
        norm("final_norm", &x)
    }

    /// Checks the number of tensors, and compares the encoder's output with [`reference`].
    fn check(configure: impl Fn(&mut EncoderConfig), expected_tensors: usize) -> Result<()> {
        let (config, encoder, tensors) = encoder(configure)?;
        assert_eq!(tensors.len(), expected_tensors, "{config:?}: {:?}", tensors.keys());
        let x = (Tensor::arange(0f32, 168., &Cpu)? * 0.7)?.sin()?.reshape((2, 7, 12))?;
        let expected = reference(&config, &tensors, &x)?;
        let difference = |got: &Tensor| -> Result<f32> {
            let differences = (got - &expected)?.abs()?.flatten_all()?.to_vec1::<f32>()?;
            Ok(differences.into_iter().max_by(f32::total_cmp).unwrap()) // NaN if there is a NaN
        };
        let trained = encoder.forward(&x, &AttentionMask::none())?;
        assert!(difference(&trained)? < 1e-5, "{config:?}: {}", difference(&trained)?);
        // Without trainable tensors, the encoder uses the CPU kernels.
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let frozen = Encoder::new(&config, vb)?;
        let batched = frozen.forward(&x, &AttentionMask::none())?;
        assert!(difference(&batched)? < 1e-5, "{config:?}: {}", difference(&batched)?);
        let mask = AttentionMask::none().with_sequences(&[0, 7, 14])?;
        let ragged = frozen.forward(&x.reshape((1, 14, 12))?, &mask)?.reshape((2, 7, 12))?;
        assert!(difference(&ragged)? < 1e-5, "{config:?}: {}", difference(&ragged)?);
        Ok(())
    }

    #[test]
    fn norms_feed_forward_networks_windows_and_shared_layers_match_the_reference() -> Result<()> {
        check(|_| (), 3 * (8 + 4 + 4))?; // BERT: attention, feed-forward network, norms
        check(|config| config.norm.placement = NormPlacement::Pre, 3 * 16)?;
        check(|config| config.norm.placement = NormPlacement::PreAndPost, 3 * 20)?;
        check(
            |config| {
                config.norm.placement = NormPlacement::Pre;
                config.norm.first_attention_norm = false;
                config.norm.final_norm = true;
                config.norm.kind = NormKind::LayerNorm { bias: false };
                config.projection_bias = mha::ProjectionBias::NONE;
                config.feed_forward.kind = FeedForwardKind::Gated;
                config.feed_forward.intermediate_bias = false;
                config.feed_forward.output_bias = false;
                config.attention_windows = vec![None, Some(2), Some(0)];
            },
            3 * (4 + 3 + 2) - 1 + 1, // ModernBERT: no first attention_norm, but a final_norm
        )?;
        check(
            |config| {
                config.norm.kind = NormKind::RmsNorm { unit_offset: false };
                config.feed_forward.kind = FeedForwardKind::Gated;
                config.feed_forward.activation = Activation::Silu;
            },
            3 * (8 + 6 + 2),
        )?;
        check(|config| config.shares_layers = true, 8 + 4 + 4) // ALBERT
    }

    #[test]
    fn rotary_positions_with_disentangled_attention_are_an_error() {
        let mut config = EncoderConfig::new(10, 12, 3, 3, 20);
        let (theta, scaling) = (1e4, mha::RotaryScaling::None);
        config.positions = Positions::Rotary(vec![RotaryPositions { theta, scaling }; 3]);
        config.disentangled = Some(crate::DisentangledConfig::new(30, None));
        assert_eq!(
            config.check().unwrap_err().to_string(),
            "EncoderConfig: positions Rotary is not supported: expected Learned, Alibi or None, with \
             disentangled attention"
        );
    }

    #[test]
    fn a_number_of_windows_other_than_the_number_of_layers_is_an_error() {
        let mut config = EncoderConfig::new(10, 12, 3, 2, 20);
        config.attention_windows = vec![None];
        assert_eq!(
            config.check().unwrap_err().to_string(),
            "EncoderConfig: number of attention_windows 1 is not supported: \
             expected one for each layer, or none"
        );
    }
}
