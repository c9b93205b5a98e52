//! The keys of `config.json` for rotary positions.

use mha::RotaryScaling;
use serde::Deserialize;

use crate::{
    EncoderConfig, Error, Positions, Result, RotaryPositions, block::check_num_hidden_layers,
    load::Json,
};

/// The settings of rotary positions.
#[derive(Default, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    /// The parameter of a variant of `ntk` that is not implemented.
    mixed_b: Option<serde_json::Value>,
}

impl Rope {
    /// Whether the object sets one of the keys of this struct.
    fn is_set(&self) -> bool {
        self.kind().is_some()
            || self.rope_theta.is_some()
            || self.factor.is_some()
            || self.partial_rotary_factor.is_some()
            || self.mixed_b.is_some()
    }

    fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.r#type.as_deref())
    }

    /// The scaling of a model that was trained with at most `trained` tokens.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a type that is not implemented, for a missing number,
    /// and for rotations of a part of a head.
    fn scaling(&self, path: &str, trained: usize) -> Result<RotaryScaling> {
        let number = |key, value: Option<f64>| match value {
            Some(number) => Ok(number),
            None => Err(Error::unsupported(path, key, "a number", "null")),
        };
        let factor = || number("factor", self.factor);
        if let Some(got) = self.partial_rotary_factor.filter(|&fraction| fraction != 1.0) {
            return Err(Error::unsupported(path, "partial_rotary_factor", "1", got));
        }
        if let Some(got) = &self.mixed_b {
            return Err(Error::unsupported(path, "mixed_b", "null", got));
        }
        match self.kind() {
            None | Some("default") => Ok(RotaryScaling::None),
            Some("linear") => Ok(RotaryScaling::Linear { factor: factor()? }),
            // In the published code, a factor below 1 scales long sequences only.
            Some("ntk") => match factor()? {
                factor if factor >= 1.0 => Ok(RotaryScaling::Ntk { factor }),
                factor => {
                    Err(Error::unsupported(path, "factor", "at least 1 for the type ntk", factor))
                }
            },
            Some("dynamic") => Ok(RotaryScaling::DynamicNtk { factor: factor()?, trained }),
            Some("llama3") => Ok(RotaryScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: number("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: number("high_freq_factor", self.high_freq_factor)?,
                trained: self.original_max_position_embeddings.unwrap_or(trained),
            }),
            Some("yarn") => {
                let trained_with = self.original_max_position_embeddings.unwrap_or(trained);
                let factor = self.factor.unwrap_or(trained as f64 / trained_with as f64);
                Ok(RotaryScaling::Yarn {
                    factor,
                    trained: trained_with,
                    beta_fast: self.beta_fast.filter(|&turns| turns != 0.0).unwrap_or(32.0),
                    beta_slow: self.beta_slow.filter(|&turns| turns != 0.0).unwrap_or(1.0),
                    truncate: self.truncate.unwrap_or(true),
                    attention_factor: self.attention_factor(factor),
                })
            }
            Some(kind) => {
                let expected = "default, linear, ntk, dynamic, llama3 or yarn";
                Err(Error::unsupported(path, "rope_type", expected, kind))
            }
        }
    }

    /// The attention factor of YaRN, as `_compute_yarn_parameters` of transformers 5.23 computes it.
    fn attention_factor(&self, factor: f64) -> f64 {
        let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let non_zero = |mscale: Option<f64>| mscale.filter(|&mscale| mscale != 0.0);
        match (self.attention_factor, non_zero(self.mscale), non_zero(self.mscale_all_dim)) {
            (Some(factor), ..) => factor,
            (None, Some(mscale), Some(all_dim)) => of(mscale) / of(all_dim),
            _ => of(1.0),
        }
    }
}

/// The keys of an encoder whose layers all have the same rotary positions.
#[derive(Deserialize)]
pub(super) struct RopeKeys {
    rope_parameters: Option<Rope>,
    /// The older name of `rope_parameters`. If both keys are set, `rope_scaling` is used.
    rope_scaling: Option<Rope>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    /// If it is set, the key of the same name in `rope_parameters` is ignored, as in transformers.
    original_max_position_embeddings: Option<usize>,
    head_dim: Option<usize>,
    /// Keys of the first NomicBERT checkpoints, which only [`Self::apply_with_factor`] uses.
    rotary_scaling_factor: Option<f64>,
    max_trained_positions: Option<usize>,
}

impl RopeKeys {
    /// Whether `rope_parameters` or `rope_scaling` sets a key of [`Rope`].
    fn are_set(&self) -> bool {
        [&self.rope_parameters, &self.rope_scaling].into_iter().flatten().any(Rope::is_set)
    }

    /// Sets the positions of `encoder`. The caller must have set `max_position_embeddings` to the
    /// value in the file. `theta` is the base if no key sets it.
    ///
    /// With dynamic scaling, `max_position_embeddings` in the file is the maximum length during
    /// training. This method sets the maximum length of a text to four times this length: NomicBERT
    /// was trained with 2,048 tokens and is used with up to 8,192.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for rotations of a part of a head, for heads of another
    /// width than `hidden_size / num_attention_heads`, for a type of scaling that is not
    /// implemented, and for a scaling without `factor`; [`mha::Error::TooLarge`] for more than
    /// 1,024 layers.
    pub(super) fn apply(self, path: &str, theta: f64, encoder: &mut EncoderConfig) -> Result<()> {
        let is_default_width = |&d: &usize| d * encoder.num_attention_heads == encoder.hidden_size;
        if let Some(got) = self.head_dim.filter(|d| !is_default_width(d)) {
            let expected = "hidden_size / num_attention_heads";
            return Err(Error::unsupported(path, "head_dim", expected, got));
        }
        let rotary = self.rotary(path, theta, encoder.max_position_embeddings)?;
        if let RotaryScaling::DynamicNtk { trained, .. } = rotary.scaling {
            encoder.max_position_embeddings = trained.saturating_mul(4);
        }
        check_num_hidden_layers(encoder.num_hidden_layers)?;
        encoder.positions = Positions::Rotary(vec![rotary; encoder.num_hidden_layers]);
        Ok(())
    }

    /// The positions of a model that was trained with at most `trained` tokens. `theta` is the base
    /// if no key sets it.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for rotations of a part of a head, for a type of scaling
    /// that is not implemented, and for a scaling without its numbers.
    pub(super) fn rotary(self, path: &str, theta: f64, trained: usize) -> Result<RotaryPositions> {
        let scaling = self.rope_scaling.filter(Rope::is_set);
        let mut rope = scaling.or(self.rope_parameters).unwrap_or_default();
        rope.partial_rotary_factor = rope.partial_rotary_factor.or(self.partial_rotary_factor);
        rope.original_max_position_embeddings =
            self.original_max_position_embeddings.or(rope.original_max_position_embeddings);
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(theta);
        Ok(RotaryPositions { theta, scaling: rope.scaling(path, trained)? })
    }

    /// [`Self::apply`] with dynamic NTK scaling if `rotary_scaling_factor` is set.
    ///
    /// # Errors
    /// The errors of [`Self::apply`]; [`crate::ConfigError::Unsupported`] if
    /// `rotary_scaling_factor` is set together with a key of [`Rope`].
    pub(super) fn apply_with_factor(
        self,
        path: &str,
        theta: f64,
        encoder: &mut EncoderConfig,
    ) -> Result<()> {
        let trained = self.max_trained_positions.unwrap_or(2048);
        let (factor, are_set) = (self.rotary_scaling_factor, self.are_set());
        self.apply(path, theta, encoder)?;
        match (factor, &mut encoder.positions) {
            (Some(factor), Positions::Rotary(layers)) if !are_set => {
                let scaling = RotaryScaling::DynamicNtk { factor, trained };
                layers.iter_mut().for_each(|layer| layer.scaling = scaling);
            }
            (Some(got), _) => {
                let expected = "null together with rope_parameters or rope_scaling";
                return Err(Error::unsupported(path, "rotary_scaling_factor", expected, got));
            }
            _ => {}
        }
        Ok(())
    }
}

/// The keys of an encoder whose global and local layers have different rotary positions.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RopeOfLayerTypes {
    full_attention: Option<Rope>,
    sliding_attention: Option<Rope>,
}

/// The kind of a layer in `layer_types`.
#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayerType {
    FullAttention,
    SlidingAttention,
}

impl LayerType {
    /// Whether the layer has a window.
    pub(super) fn is_local(self) -> bool {
        self == Self::SlidingAttention
    }

    /// The kinds of all layers: `listed`, or the kinds that `is_local` determines.
    ///
    /// # Errors
    /// [`mha::Error::TooLarge`] for more than 1,024 layers; [`crate::ConfigError::Unsupported`] if
    /// `listed` has another number of kinds.
    pub(super) fn of_layers(
        path: &str,
        listed: Option<Vec<Self>>,
        layers: usize,
        is_local: impl Fn(usize) -> bool,
    ) -> Result<Vec<Self>> {
        check_num_hidden_layers(layers)?;
        match listed {
            Some(types) if types.len() == layers => Ok(types),
            Some(types) => {
                let (key, expected) = ("number of layer_types", "one for each layer");
                Err(Error::unsupported(path, key, expected, types.len().to_string()))
            }
            None => {
                let kind =
                    |i| if is_local(i) { Self::SlidingAttention } else { Self::FullAttention };
                Ok((0..layers).map(kind).collect())
            }
        }
    }
}

impl RopeOfLayerTypes {
    /// Sets the key `rope_scaling` of older files, for the global layers.
    pub(super) fn with_global_scaling(self, json: &Json) -> Result<Self> {
        let OldScaling { rope_scaling } = json.to()?;
        let theta = |rope: Option<&Rope>| rope.and_then(|rope| rope.rope_theta);
        match rope_scaling.filter(Rope::is_set) {
            None => Ok(self),
            Some(mut scaling) => {
                scaling.rope_theta = scaling.rope_theta.or(theta(self.full_attention.as_ref()));
                Ok(Self { full_attention: Some(scaling), ..self })
            }
        }
    }

    /// The positions of each layer. `global` and `local` are the bases that the file does not set
    /// here; the model was trained with at most `trained` tokens.
    ///
    /// # Errors
    /// The errors of [`RopeKeys::rotary`].
    pub(super) fn positions(
        self,
        path: &str,
        [global, local]: [f64; 2],
        trained: usize,
        types: &[LayerType],
    ) -> Result<Positions> {
        let of = |rope: Option<Rope>, theta| -> Result<RotaryPositions> {
            // transformers 5.23 reads `truncate` outside this object, where it never is.
            let rope = Rope { truncate: None, ..rope.unwrap_or_default() };
            let scaling = rope.scaling(path, trained)?;
            Ok(RotaryPositions { theta: rope.rope_theta.unwrap_or(theta), scaling })
        };
        let global = of(self.full_attention, global)?;
        let local = of(self.sliding_attention, local)?;
        let of_layer = |kind: &LayerType| match kind {
            LayerType::FullAttention => global,
            LayerType::SlidingAttention => local,
        };
        Ok(Positions::Rotary(types.iter().map(of_layer).collect()))
    }
}

/// The key of older files for scaled frequencies.
#[derive(Deserialize)]
struct OldScaling {
    rope_scaling: Option<Rope>,
}
