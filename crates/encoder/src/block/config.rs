//! The config of an encoder: its sizes and the variant of each part.

use mha::{AttentionConfig, ComputeType, ProjectionBias, QueryKeyNorm, RotaryScaling};

use crate::{Activation, ConfigError, Error, Result};

/// The sizes and the variants of an encoder.
///
/// [`Self::new`] selects BERT's variants.
/// [`BertConfig::encoder_config`](crate::BertConfig::encoder_config) returns the config of a BERT
/// checkpoint.
///
/// # Examples
/// A pre-norm encoder with a gated feed-forward network. Layers 0 and 3 attend to all keys; the
/// other layers attend to the keys at a distance of at most 64:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use encoder::{Encoder, EncoderConfig, FeedForwardKind, NormPlacement};
/// use mha::AttentionMask;
///
/// let mut config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// config.norm.placement = NormPlacement::Pre;
/// config.norm.final_norm = true;
/// config.feed_forward.kind = FeedForwardKind::Gated;
/// config.attention_windows = (0..4).map(|i| (i % 3 != 0).then_some(64)).collect();
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let encoder = Encoder::new(&config, vb)?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// assert_eq!(encoder.forward(&x, &AttentionMask::none())?.dims(), [1, 5, 12]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EncoderConfig {
    /// Number of rows of the word embeddings.
    pub vocab_size: usize,
    /// E, the width of the hidden states.
    pub hidden_size: usize,
    /// L, the number of layers.
    pub num_hidden_layers: usize,
    /// H, the number of attention heads of a layer.
    pub num_attention_heads: usize,
    /// G, the number of key-value heads of a layer, if groups of H / G heads share keys and values.
    /// `None`: H.
    pub num_key_value_heads: Option<usize>,
    /// D, the width of a head. `None`: E / H.
    pub head_dim: Option<usize>,
    /// The factor of the attention scores. `None`: 1/√D.
    pub attention_scale: Option<f64>,
    /// Whether RMSNorms with the ε of `norm` normalise the queries and the keys of each head.
    pub query_key_norm: bool,
    /// Whether each token attends only to itself and to the tokens before it.
    pub causal: bool,
    /// Whether the layers have cross-attention to a memory; `None`: if the weights have its tensors.
    pub cross_attention: Option<bool>,
    /// F, the width inside the feed-forward network.
    pub intermediate_size: usize,
    /// Number of rows of the position embeddings. Without position embeddings, the maximum number
    /// of tokens of a sequence.
    pub max_position_embeddings: usize,
    /// The input embeddings.
    pub embeddings: EmbeddingsConfig,
    /// How the encoder represents positions.
    pub positions: Positions,
    /// A learned bias on the attention scores, which all layers share.
    pub relative_bias: Option<RelativeBiasConfig>,
    /// Disentangled attention: scores with embeddings of relative positions, which all layers
    /// share.
    pub disentangled: Option<DisentangledConfig>,
    /// The normalisations.
    pub norm: NormConfig,
    /// Which attention projections have a bias.
    pub projection_bias: ProjectionBias,
    /// The feed-forward network.
    pub feed_forward: FeedForwardConfig,
    /// The attention window of each layer: the largest distance between a query and a visible key,
    /// in both directions unless `causal` is true. `None` for a layer without a window. Empty if all layers attend to all keys.
    pub attention_windows: Vec<Option<usize>>,
    /// Whether all layers share the same weights.
    pub shares_layers: bool,
    /// The number format of the matrix products in linear layers.
    pub compute_type: ComputeType,
}

/// The input embeddings.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EmbeddingsConfig {
    /// The width of the embedding tables, if a linear map projects the sum of the embeddings to
    /// `hidden_size`. `None`: the tables have the width `hidden_size`, and there is no projection.
    pub embedding_size: Option<usize>,
    /// Number of token types; `None` for an encoder without token type embeddings.
    pub type_vocab_size: Option<usize>,
    /// Whether the sum of the embeddings is normalised.
    pub norm: bool,
    /// A factor of the word embeddings.
    pub scale: Option<f64>,
}

/// How an encoder represents the positions of tokens.
///
/// # Examples
/// An encoder for sequences of up to 8,192 tokens that was trained with 2,048:
/// ```
/// use encoder::{EncoderConfig, Positions, RotaryPositions};
/// use mha::RotaryScaling;
///
/// let mut config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// let scaling = RotaryScaling::DynamicNtk { factor: 2., trained: 2048 };
/// config.positions = Positions::Rotary(vec![RotaryPositions { theta: 1000., scaling }; 4]);
/// config.max_position_embeddings = 8192;
/// config.check()?;
/// assert_eq!(config.max_tokens(), 8192);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Positions {
    /// No positions.
    None,
    /// A table of position embeddings, added to the word embeddings.
    Learned {
        /// The id of the padding token, for RoBERTa's positions: the first token that is not
        /// padding has position `padding_idx + 1`. Padding tokens have position `padding_idx` and
        /// are not counted. `None`: the position is the index of the token in its sequence.
        padding_idx: Option<u32>,
    },
    /// Rotation of the queries and keys of each layer (Su et al. 2021,
    /// <https://arxiv.org/abs/2104.09864>).
    Rotary(Vec<RotaryPositions>),
    /// A bias on the attention scores, linear in the distance: [`mha::alibi()`] (Press et al. 2022,
    /// <https://arxiv.org/abs/2108.12409>).
    Alibi,
}

/// The rotary positions of a layer: [`mha::Rotary`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::exhaustive_structs)] // a struct of plain values
pub struct RotaryPositions {
    /// The base of the rotation frequencies.
    pub theta: f64,
    /// How the frequencies are scaled.
    pub scaling: RotaryScaling,
}

/// A learned bias on the attention scores, per head and bucket of distances: [`mha::RelativeBias`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RelativeBiasConfig {
    /// Number of buckets.
    pub num_buckets: usize,
    /// In each direction, all distances of at least this value share a bucket.
    pub max_distance: usize,
}

impl RelativeBiasConfig {
    /// A bias with `num_buckets` buckets for distances up to `max_distance`.
    pub fn new(num_buckets: usize, max_distance: usize) -> Self {
        Self { num_buckets, max_distance }
    }
}

/// Disentangled attention with embeddings of relative positions: [`mha::DisentangledPositions`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DisentangledConfig {
    /// In each direction, all distances of at least this value share a position.
    pub max_relative_positions: usize,
    /// Number of positions in each direction, before and after a token, if large distances share
    /// positions: [`mha::log_relative_position`]. Distances up to half this number have different
    /// positions. `None`: all distances below `max_relative_positions` have different positions.
    pub position_buckets: Option<usize>,
    /// Whether queries are multiplied by the projected positions.
    pub content_to_position: bool,
    /// Whether keys are multiplied by the projected positions.
    pub position_to_content: bool,
    /// Whether the embeddings are normalised.
    pub norm: bool,
}

impl DisentangledConfig {
    /// DeBERTa-v3's config: `content_to_position`, `position_to_content` and `norm` are true.
    pub fn new(max_relative_positions: usize, position_buckets: Option<usize>) -> Self {
        let (content_to_position, position_to_content, norm) = (true, true, true);
        Self {
            max_relative_positions,
            position_buckets,
            content_to_position,
            position_to_content,
            norm,
        }
    }

    /// Half the number of embeddings.
    fn span(&self) -> usize {
        self.position_buckets.unwrap_or(self.max_relative_positions)
    }

    /// Number of embeddings.
    pub(crate) fn rows(&self) -> usize {
        2 * self.span()
    }

    /// The row of the embeddings for a distance, the index of the key minus that of the query.
    pub(crate) fn row(&self, distance: isize) -> u32 {
        let position = match self.position_buckets {
            Some(buckets) if distance.unsigned_abs() > buckets / 2 => {
                mha::log_relative_position(-distance, buckets, self.max_relative_positions)
            }
            _ => -distance,
        };
        let span = self.span() as isize;
        (position + span).clamp(0, 2 * span - 1) as u32
    }
}

/// The normalisations of an encoder.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormConfig {
    /// The formula.
    pub kind: NormKind,
    /// ε, which is added to the variance (LayerNorm) or to the mean square (RMSNorm).
    pub eps: f64,
    /// The position of the normalisations in a layer.
    pub placement: NormPlacement,
    /// Whether the first layer normalises the input of its attention. Ignored if `placement` is
    /// [`NormPlacement::Post`].
    pub first_attention_norm: bool,
    /// Whether the output of the last layer is normalised.
    pub final_norm: bool,
}

/// The formula of a normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormKind {
    /// `(x − mean(x)) / √(var(x) + ε) · weight + bias`, or without `bias`.
    LayerNorm {
        /// Whether the formula has the bias.
        bias: bool,
    },
    /// `x / √(mean(x²) + ε) · weight`, or `· (1 + weight)` (Zhang and Sennrich 2019,
    /// <https://arxiv.org/abs/1910.07467>).
    RmsNorm {
        /// Whether 1 is added to the weight, as in Gemma.
        unit_offset: bool,
    },
}

/// The position of the normalisations in a layer (Xiong et al. 2020,
/// <https://arxiv.org/abs/2002.04745>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormPlacement {
    /// After the residual sum: `norm(x + f(x))`.
    Post,
    /// Before the attention and before the feed-forward network: `x + f(norm(x))`.
    Pre,
    /// Before and after the attention and the feed-forward network: `x + norm(f(norm(x)))`.
    PreAndPost,
}

/// The feed-forward network.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FeedForwardConfig {
    /// Dense or gated.
    pub kind: FeedForwardKind,
    /// The activation.
    pub activation: Activation,
    /// Whether the linear maps from E to F have a bias.
    pub intermediate_bias: bool,
    /// Whether the linear map from F to E has a bias.
    pub output_bias: bool,
}

/// The formula of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FeedForwardKind {
    /// `output(activation(intermediate(x)))`
    Dense,
    /// `output(activation(gate(x)) · intermediate(x))` (Shazeer 2020,
    /// <https://arxiv.org/abs/2002.05202>)
    Gated,
}

/// The maximum of `hidden_size`, `embedding_size` and `intermediate_size`. The limit bounds the
/// memory that a wrong number in a `config.json` allocates.
const MAX_WIDTH: usize = 1 << 20;

/// The maximum of the sizes in [`DisentangledConfig`], and of `max_position_embeddings` if the
/// encoder computes a table for all positions ([`EncoderConfig::uses_tables`]). The limit bounds
/// the memory that a wrong number in a `config.json` allocates.
const MAX_COMPUTED_POSITIONS: usize = 1 << 20;

/// The maximum number of heads times positions with ALiBi. Limits memory, as [`MAX_WIDTH`] does.
const MAX_BIASES: usize = 1 << 24;

/// The maximum number of angles of all rotary tables. Limits memory, as [`MAX_WIDTH`] does.
const MAX_ANGLES: usize = 1 << 26;

impl EncoderConfig {
    /// A config with BERT's variants: 512 learned positions, two token types, post-norm, LayerNorm
    /// with ε = 10⁻¹², a bias in every linear map and LayerNorm, and a dense feed-forward network
    /// with GELU.
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        intermediate_size: usize,
    ) -> Self {
        Self {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: None,
            head_dim: None,
            attention_scale: None,
            query_key_norm: false,
            causal: false,
            cross_attention: Some(false),
            intermediate_size,
            max_position_embeddings: 512,
            embeddings: EmbeddingsConfig {
                embedding_size: None,
                type_vocab_size: Some(2),
                norm: true,
                scale: None,
            },
            positions: Positions::Learned { padding_idx: None },
            relative_bias: None,
            disentangled: None,
            norm: NormConfig {
                kind: NormKind::LayerNorm { bias: true },
                eps: 1e-12,
                placement: NormPlacement::Post,
                first_attention_norm: true,
                final_norm: false,
            },
            projection_bias: ProjectionBias::ALL,
            feed_forward: FeedForwardConfig {
                kind: FeedForwardKind::Dense,
                activation: Activation::Gelu,
                intermediate_bias: true,
                output_bias: true,
            },
            attention_windows: vec![],
            shares_layers: false,
            compute_type: ComputeType::F32,
        }
    }

    /// The config of each layer's attention.
    ///
    /// # Errors
    /// The errors of [`AttentionConfig::check`].
    pub fn attention(&self) -> Result<AttentionConfig> {
        let heads = self.num_attention_heads;
        let mut config = AttentionConfig::new(self.hidden_size, heads)
            .with_key_value_heads(self.num_key_value_heads.unwrap_or(heads))
            .with_bias(self.projection_bias)
            .with_compute_type(self.compute_type);
        config.head_dim = self.head_dim;
        config.scale = self.attention_scale;
        config.query_key_norm = self.query_key_norm.then_some(QueryKeyNorm {
            eps: self.norm.eps,
            unit_offset: self.norm.kind == NormKind::RmsNorm { unit_offset: true },
        });
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes are consistent and that the variants are implemented.
    ///
    /// # Errors
    /// - [`mha::Error::Zero`] if a size, or `trained` in a rotary scaling, is 0
    /// - [`mha::Error::TooLarge`] if `num_hidden_layers` exceeds 1,024
    /// - [`mha::Error::HeadsDoNotDivide`] if `head_dim` is `None` and `hidden_size` is not a multiple
    ///   of `num_attention_heads`; [`mha::Error::GroupsDoNotDivide`] if `num_attention_heads` is not
    ///   a multiple of `num_key_value_heads`
    /// - [`mha::Error::OddHeadDim`] for rotary positions with an odd head width
    /// - [`ConfigError::Value`] if `eps` is negative or not finite, a rotary `theta` is not a
    ///   positive number, or `embeddings.scale` is not finite; [`mha::Error::Value`] if a number of a
    ///   rotary scaling is out of range
    /// - [`ConfigError::Unsupported`]
    ///   - if `hidden_size`, `embedding_size` or `intermediate_size` exceeds 2²⁰, or `vocab_size`
    ///     exceeds 2³² − 1
    ///   - if `max_position_embeddings` leaves no position for a token, or exceeds 2²⁰ with rotary,
    ///     ALiBi, relative or disentangled positions
    ///   - for more than 2²⁴ heads times positions with ALiBi, or more than 2²⁶ rotary angles
    ///   - if the sizes in `relative_bias` or `disentangled` are not consistent, or those in
    ///     `disentangled` exceed 2²⁰
    ///   - for rotary positions with disentangled attention, and for `embeddings.scale` with token
    ///     types or learned positions
    ///   - if the rotary positions do not have `num_hidden_layers` values, or if
    ///     `attention_windows` is neither empty nor of this length
    ///
    /// # Examples
    /// ```
    /// use encoder::{EncoderConfig, Positions, RotaryPositions};
    /// use mha::RotaryScaling;
    ///
    /// let mut config = EncoderConfig::new(100, 12, 4, 3, 24); // 4 layers
    /// let (theta, scaling) = (1e4, RotaryScaling::None);
    /// config.positions = Positions::Rotary(vec![RotaryPositions { theta, scaling }]);
    /// assert_eq!(
    ///     config.check().unwrap_err().to_string(),
    ///     "EncoderConfig: number of rotary positions 1 is not supported: expected one for each layer"
    /// );
    /// config.positions = Positions::Alibi;
    /// config.check()?;
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.embeddings.type_vocab_size.unwrap_or(1)),
            ("embedding_size", self.embeddings.embedding_size.unwrap_or(1)),
        ] {
            if size == 0 {
                return Err(mha::Error::Zero { field }.into());
            }
        }
        for (key, size) in [
            ("hidden_size", self.hidden_size),
            ("embedding_size", self.embedding_size()),
            ("intermediate_size", self.intermediate_size),
        ] {
            if size > MAX_WIDTH {
                return unsupported(key, "at most 2^20", &size.to_string());
            }
        }
        if u32::try_from(self.vocab_size).is_err() {
            let (expected, got) = ("less than 2^32, since token ids are u32", self.vocab_size);
            return unsupported("vocab_size", expected, &got.to_string());
        }
        check_num_hidden_layers(self.num_hidden_layers)?;
        if self.max_tokens() == 0 {
            let (got, expected) = (self.max_position_embeddings, "more than padding_idx + 1 rows");
            return unsupported("max_position_embeddings", expected, &got.to_string());
        }
        if let Some(scale) = self.embeddings.scale {
            if !scale.is_finite() {
                let (field, expected) = ("embeddings.scale", "a finite number");
                return Err(ConfigError::Value { field, expected, got: scale }.into());
            }
            let has_other_tables = self.embeddings.type_vocab_size.is_some()
                || matches!(self.positions, Positions::Learned { .. });
            if has_other_tables {
                let expected = "None with token types or learned positions";
                return unsupported("embeddings.scale", expected, &scale.to_string());
            }
        }
        if let Some(RelativeBiasConfig { num_buckets, max_distance }) = self.relative_bias
            && (num_buckets < 4 || max_distance <= num_buckets / 4)
        {
            let expected = "at least 4 buckets, and a max_distance above a quarter of them";
            let got = format!("{num_buckets} buckets, max_distance {max_distance}");
            return unsupported("relative_bias", expected, &got);
        }
        if let Some(DisentangledConfig { max_relative_positions: max, position_buckets, .. }) =
            self.disentangled
        {
            for (key, size) in
                [("max_relative_positions", Some(max)), ("position_buckets", position_buckets)]
            {
                if let Some(got) = size.filter(|&size| size > MAX_COMPUTED_POSITIONS) {
                    return unsupported(key, "at most 2^20", &got.to_string());
                }
            }
            let (expected, fits) = match position_buckets {
                Some(n) if n < 4 => {
                    return unsupported("position_buckets", "at least 4", &n.to_string());
                }
                // Distances share positions only above n / 2.
                Some(n) => (
                    "a value above position_buckets / 2 + 1, or at most position_buckets / 2 + 1 \
                     tokens",
                    max > n / 2 + 1 || self.max_tokens() <= n / 2 + 1,
                ),
                None => ("at least 1", max > 0),
            };
            if !fits {
                return unsupported("max_relative_positions", expected, &max.to_string());
            }
        }
        let eps = self.norm.eps;
        if !(eps.is_finite() && eps >= 0.0) {
            let field = match self.norm.kind {
                NormKind::LayerNorm { .. } => "layer_norm_eps",
                NormKind::RmsNorm { .. } => "rms_norm_eps",
            };
            let expected = "0 or a small positive number";
            return Err(ConfigError::Value { field, expected, got: eps }.into());
        }
        let head_dim = self.attention()?.head_dim();
        if self.uses_tables() && self.max_position_embeddings > MAX_COMPUTED_POSITIONS {
            let (expected, got) = ("at most 2^20 positions", self.max_position_embeddings);
            return unsupported("max_position_embeddings", expected, &got.to_string());
        }
        if self.disentangled.is_some() && matches!(self.positions, Positions::Rotary(_)) {
            // The scores would depend on absolute positions, and so on the amount of padding.
            let expected = "Learned, Alibi or None, with disentangled attention";
            return unsupported("positions", expected, "Rotary");
        }
        let heads = self.num_attention_heads;
        if self.positions == Positions::Alibi
            && heads.saturating_mul(self.max_tokens()) > MAX_BIASES
        {
            let expected =
                "num_attention_heads × max_position_embeddings of at most 2^24 with ALiBi";
            return unsupported("num_attention_heads", expected, &heads.to_string());
        }
        if let Positions::Rotary(rotary) = &self.positions {
            if rotary.len() != self.num_hidden_layers {
                let (expected, got) = ("one for each layer", rotary.len().to_string());
                return unsupported("number of rotary positions", expected, &got);
            }
            for &RotaryPositions { theta, scaling } in rotary {
                if !(theta.is_finite() && theta > 0.0) {
                    let (field, expected) = ("rope_theta", "a positive number");
                    return Err(ConfigError::Value { field, expected, got: theta }.into());
                }
                scaling.check()?;
            }
            if !head_dim.is_multiple_of(2) {
                return Err(mha::Error::OddHeadDim { got: head_dim }.into());
            }
            let tables = distinct(rotary).0.len();
            let (positions, frequencies) = (self.max_position_embeddings, head_dim / 2);
            let angles = tables.saturating_mul(frequencies).saturating_mul(positions);
            if angles > MAX_ANGLES {
                let got = format!(
                    "{angles} ({positions} positions × {frequencies} frequencies × {tables} \
                     different rope_theta)"
                );
                return unsupported("number of rotary angles", "at most 2^26 angles", &got);
            }
        }
        let (windows, layers) = (self.attention_windows.len(), self.num_hidden_layers);
        if windows != 0 && windows != layers {
            let expected = "one for each layer, or none";
            return unsupported("number of attention_windows", expected, &windows.to_string());
        }
        Ok(())
    }

    /// Maximum number of tokens of a sequence.
    ///
    /// # Examples
    /// ```
    /// use encoder::{EncoderConfig, Positions};
    ///
    /// let mut config = EncoderConfig::new(100, 12, 4, 3, 24);
    /// config.max_position_embeddings = 514;
    /// config.positions = Positions::Learned { padding_idx: Some(1) };
    /// assert_eq!(config.max_tokens(), 512);
    /// ```
    pub fn max_tokens(&self) -> usize {
        let first = match self.positions {
            Positions::Learned { padding_idx: Some(padding) } => padding as usize + 1,
            _ => 0,
        };
        self.max_position_embeddings.saturating_sub(first)
    }

    /// Whether attention depends on the distances of tokens, not only on position ids.
    pub(crate) fn uses_distances(&self) -> bool {
        self.uses_tables() || self.attention_windows.iter().any(Option::is_some)
    }

    /// Whether the encoder has a table of distances or of rotations.
    pub(crate) fn uses_tables(&self) -> bool {
        matches!(self.positions, Positions::Rotary(_) | Positions::Alibi)
            || self.relative_bias.is_some()
            || self.disentangled.is_some()
    }

    /// Whether the keys and values of a token depend only on the ids of the tokens up to it: the
    /// attention is causal, and the positions are rotary with frequencies that do not depend on the
    /// length of the sequence.
    pub(crate) fn shares_prefixes(&self) -> bool {
        let is_fixed =
            |layer: &RotaryPositions| !matches!(layer.scaling, RotaryScaling::DynamicNtk { .. });
        self.causal
            && matches!(&self.positions, Positions::Rotary(layers) if layers.iter().all(is_fixed))
            && self.embeddings.type_vocab_size.is_none()
            && self.relative_bias.is_none()
            && self.disentangled.is_none()
    }

    /// The size in bytes of the keys and values of a token in all layers, in f32.
    pub(crate) fn key_value_bytes(&self) -> usize {
        let heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1));
        self.num_hidden_layers * heads * 2 * head_dim * size_of::<f32>()
    }

    /// The position ids of the tokens of a sequence.
    pub(crate) fn position_ids(&self, input_ids: &[u32]) -> Vec<u32> {
        match self.positions {
            Positions::Learned { padding_idx: Some(padding) } => {
                let mut last = padding;
                let ids = input_ids.iter().map(|&id| {
                    last += u32::from(id != padding);
                    if id == padding { padding } else { last }
                });
                ids.collect()
            }
            _ => (0..input_ids.len() as u32).collect(),
        }
    }

    /// The attention window of layer `layer`: the largest distance between a query and a visible
    /// key.
    pub(crate) fn window(&self, layer: usize) -> Option<usize> {
        self.attention_windows.get(layer).copied().flatten()
    }

    /// The width of the embedding tables.
    pub(crate) fn embedding_size(&self) -> usize {
        self.embeddings.embedding_size.unwrap_or(self.hidden_size)
    }
}

/// The distinct values of `all`, in the order of their first occurrence, and the index in them of
/// each element of `all`.
pub(super) fn distinct<T: PartialEq + Copy>(all: &[T]) -> (Vec<T>, Vec<usize>) {
    let mut distinct = vec![];
    let indices = all.iter().map(|x| {
        distinct.iter().position(|known| known == x).unwrap_or_else(|| {
            distinct.push(*x);
            distinct.len() - 1
        })
    });
    let indices = indices.collect();
    (distinct, indices)
}

/// Checks that a config has at most 1,024 layers, more than any published model has. Each layer
/// takes time and memory, even if the checkpoint has no tensors for it.
///
/// # Errors
/// [`mha::Error::TooLarge`] for more than 1,024 layers.
pub(crate) fn check_num_hidden_layers(got: usize) -> Result<()> {
    let (field, max) = ("num_hidden_layers", 1024);
    if got <= max { Ok(()) } else { Err(mha::Error::TooLarge { field, got, max }.into()) }
}

/// [`ConfigError::Unsupported`] for a value of an [`EncoderConfig`].
pub(crate) fn unsupported(key: &'static str, expected: &'static str, got: &str) -> Result<()> {
    Err(Error::unsupported("EncoderConfig", key, expected, got))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows are those of `make_log_bucket_position` in transformers, which returns the distance
    /// if it is at most half the number of buckets.
    #[test]
    fn short_sequences_do_not_need_a_maximum_distance_above_half_the_buckets() -> Result<()> {
        let mut config = EncoderConfig::new(31, 8, 1, 1, 8);
        config.max_position_embeddings = 24;
        let positions = DisentangledConfig::new(24, Some(256));
        config.disentangled = Some(positions.clone());
        config.check()?;
        assert_eq!([-23, 0, 23].map(|distance| positions.row(distance)), [279, 256, 233]);
        for (tokens, is_supported) in [(129, true), (130, false)] {
            config.max_position_embeddings = tokens;
            assert_eq!(config.check().is_ok(), is_supported, "{tokens} tokens");
        }
        config.disentangled = Some(DisentangledConfig::new(24, Some(3)));
        assert_eq!(
            config.check().unwrap_err().to_string(),
            "EncoderConfig: position_buckets 3 is not supported: expected at least 4"
        );
        Ok(())
    }
}
