//! The keys of `config.json` for rotary positions.

use mha::RotaryScaling;
use serde::Deserialize;

use crate::{EncoderConfig, Error, Positions, Result, block::check_num_hidden_layers};

/// The settings of rotary positions.
#[derive(Default, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    partial_rotary_factor: Option<f64>,
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

    /// The base of the rotation frequencies, if it is set; `path` names the file in errors.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for scaled frequencies.
    fn theta(&self, path: &str) -> Result<Option<f64>> {
        match self.kind() {
            None | Some("default") => Ok(self.rope_theta),
            Some(kind) => Err(Error::unsupported(path, "rope_type", "default", kind)),
        }
    }

    /// The scaling of a model that was trained with at most `trained` tokens.
    fn scaling(&self, path: &str, trained: usize) -> Result<RotaryScaling> {
        let factor = || match self.factor {
            Some(factor) => Ok(factor),
            None => Err(Error::unsupported(path, "factor", "a number", "null")),
        };
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
            Some(kind) => {
                Err(Error::unsupported(path, "rope_type", "default, linear, ntk or dynamic", kind))
            }
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
        let scaling = self.rope_scaling.filter(Rope::is_set);
        let rope = scaling.or(self.rope_parameters).unwrap_or_default();
        let fraction = rope.partial_rotary_factor.or(self.partial_rotary_factor);
        if let Some(got) = fraction.filter(|&fraction| fraction != 1.0) {
            return Err(Error::unsupported(path, "partial_rotary_factor", "1", got));
        }
        let is_default_width = |&d: &usize| d * encoder.num_attention_heads == encoder.hidden_size;
        if let Some(got) = self.head_dim.filter(|d| !is_default_width(d)) {
            let expected = "hidden_size / num_attention_heads";
            return Err(Error::unsupported(path, "head_dim", expected, got));
        }
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(theta);
        let scaling = rope.scaling(path, encoder.max_position_embeddings)?;
        if let RotaryScaling::DynamicNtk { trained, .. } = scaling {
            encoder.max_position_embeddings = trained.saturating_mul(4);
        }
        check_num_hidden_layers(encoder.num_hidden_layers)?;
        encoder.positions =
            Positions::Rotary { theta: vec![theta; encoder.num_hidden_layers], scaling };
        Ok(())
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
            (Some(factor), Positions::Rotary { scaling, .. }) if !are_set => {
                *scaling = RotaryScaling::DynamicNtk { factor, trained };
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

impl RopeOfLayerTypes {
    /// The bases of global and of local layers, if they are set.
    ///
    /// # Errors
    /// The errors of [`Rope::theta`].
    pub(super) fn thetas(self, path: &str) -> Result<[Option<f64>; 2]> {
        let theta = |rope: Option<Rope>| rope.map_or(Ok(None), |rope| rope.theta(path));
        Ok([theta(self.full_attention)?, theta(self.sliding_attention)?])
    }
}
