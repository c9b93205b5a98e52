//! Pooling: from the hidden states of a sequence to one vector. The config is
//! `1_Pooling/config.json`.

use std::{fmt, ops::Range};

use candle_core::{DType, Tensor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::{
    Choice, ConfigError, Error, InputError, Result,
    load::{Json, parse_value},
    models::encoder_model::no_rows,
};

crate::choices! {
    /// A function from the hidden states of a sequence to one vector.
    ///
    /// The names are those of sentence-transformers, which concatenates, in this order, the modes
    /// whose switches `pooling_mode_*` are true.
    pub enum PoolingMode: "pooling mode" {
        /// The hidden state of the first token, `[CLS]`.
        Cls = "cls",
        /// The element-wise maximum over the tokens.
        Max = "max",
        /// The mean over the tokens.
        Mean = "mean",
        /// The sum over the tokens, divided by the square root of their number.
        MeanSqrtLen = "mean_sqrt_len_tokens",
        /// The mean over the tokens, where token i, counted from 1, has weight i.
        WeightedMean = "weightedmean",
        /// The hidden state of the last token.
        LastToken = "lasttoken",
    }
}

/// Pools the hidden states of each sequence to one vector. The vectors of several modes are
/// concatenated.
///
/// # Source
/// `Pooling` of sentence-transformers.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{Pooling, PoolingMode};
///
/// // Two ragged sequences, of two tokens and of one.
/// let hidden = Tensor::new(&[[1f32, 8.], [3., 4.], [5., 6.]], &Cpu)?;
/// let pool = |pooling: Pooling| pooling.forward(&hidden, &[0, 2, 3], None)?.to_vec2::<f32>();
/// assert_eq!(pool(PoolingMode::Mean.into())?, [[2., 6.], [5., 6.]]);
/// assert_eq!(pool(PoolingMode::Cls.into())?, [[1., 8.], [5., 6.]]);
/// assert_eq!(pool(PoolingMode::WeightedMean.into())?[0], [7. / 3., 16. / 3.]);
/// let both = Pooling::new(&[PoolingMode::Max, PoolingMode::LastToken])?;
/// assert_eq!(pool(both)?, [[3., 8., 3., 4.], [5., 6., 5., 6.]]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooling {
    modes: Vec<PoolingMode>,
    include_prompt: bool,
}

/// For example `Pooling(cls + mean)`, or `Pooling(mean, without prompt)`.
impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let modes: Vec<String> = self.modes.iter().map(PoolingMode::to_string).collect();
        let without = if self.include_prompt { "" } else { ", without prompt" };
        write!(f, "Pooling({}{without})", modes.join(" + "))
    }
}

impl From<PoolingMode> for Pooling {
    fn from(mode: PoolingMode) -> Self {
        Self { modes: vec![mode], include_prompt: true }
    }
}

impl Pooling {
    /// A pooling that concatenates the vectors of the modes.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if there is no mode.
    pub fn new(modes: &[PoolingMode]) -> Result<Self> {
        if modes.is_empty() {
            let (field, expected) = ("number of pooling modes", "at least 1");
            return Err(ConfigError::Value { field, expected, got: 0.0 }.into());
        }
        Ok(Self { modes: modes.to_vec(), include_prompt: true })
    }

    /// Excludes the prompt's tokens from the pooling.
    pub fn without_prompt(self) -> Self {
        Self { include_prompt: false, ..self }
    }

    /// Whether the tokens of a prompt are included.
    pub(crate) fn includes_prompt(&self) -> bool {
        self.include_prompt
    }

    /// Parses a `1_Pooling/config.json`. `path` names the file in errors. If `pooling_mode` is
    /// absent and no key `pooling_mode_*` is true, the mode is [`PoolingMode::Mean`].
    ///
    /// # Errors
    /// [`crate::FileError::Json`] if the file cannot be parsed; [`ConfigError::Unsupported`] for a
    /// file without the keys of a pooling, for an empty list of modes, or a mode that
    /// [`PoolingMode`] lacks.
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        Self::read(&Json::new(json.to_vec(), path))
    }

    /// [`Self::from_json`] for a parsed file.
    pub(crate) fn read(json: &Json) -> Result<Self> {
        let (keys, path): (Map<String, Value>, _) = (json.to()?, json.path());
        let unsupported =
            |expected, got: String| Error::unsupported(path, "pooling_mode", expected, got);
        let is_of_pooling = |key: &String| {
            key.starts_with("pooling_mode")
                || ["embedding_dimension", "word_embedding_dimension"].contains(&key.as_str())
        };
        if !keys.keys().any(is_of_pooling) {
            let expected = "a pooling_mode or the embedding_dimension of a Pooling module; check \
                            the module's path in modules.json";
            return Err(unsupported(expected, "none".to_string()));
        }
        let config: PoolingConfig = parse_value(Value::Object(keys), path)?;
        let names = config.modes();
        let modes: std::result::Result<Vec<_>, _> =
            names.iter().map(|name| name.parse::<PoolingMode>()).collect();
        let modes = modes.ok().filter(|modes| !modes.is_empty()).ok_or_else(|| {
            let expected =
                "some of cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken";
            let got = if names.is_empty() { "none".to_string() } else { names.join(" + ") };
            unsupported(expected, got)
        })?;
        Ok(Self { modes, include_prompt: config.include_prompt })
    }

    /// The length of the pooled vectors for hidden states of length `hidden_size`.
    pub fn dimension(&self, hidden_size: usize) -> usize {
        self.modes.len() * hidden_size
    }

    /// The index in each ragged sequence of the token whose hidden state is the vector; `None` if the
    /// pooling reads more tokens. The arguments are those of [`Self::forward`].
    ///
    /// # Errors
    /// [`InputError::OnlyPrompt`] for a sequence without tokens after the prompt, if the prompt is
    /// excluded.
    pub(crate) fn one_token(
        &self,
        offsets: &[usize],
        prompts: &[usize],
    ) -> Result<Option<Vec<usize>>> {
        let [mode @ (PoolingMode::Cls | PoolingMode::LastToken)] = self.modes[..] else {
            return Ok(None);
        };
        let token = |(w, &prompt): (&[usize], &usize)| {
            let tokens = w[1] - w[0];
            let first = if self.include_prompt { 0 } else { prompt };
            if first > 0 && first >= tokens {
                return Err(InputError::OnlyPrompt { tokens }.into());
            }
            Ok(if mode == PoolingMode::Cls { first } else { tokens.saturating_sub(1) })
        };
        let tokens: Result<Vec<_>> = offsets.windows(2).zip(prompts).map(token).collect();
        tokens.map(Some)
    }

    /// Pools ragged sequences. `prompts` holds the number of prompt tokens at the beginning of each
    /// sequence.
    ///
    /// # Shapes
    /// `hidden`: `(N, E)`, B ragged sequences, none empty; `offsets`: the index of each sequence's
    /// first token, then N; returns `(B, modes·E)`, f32
    /// # Errors
    /// [`mha::Error::Offset`] if the offsets do not increase from 0 to N; [`mha::Error::Shape`] if
    /// there is no offset, or if `prompts` has another length than B; [`InputError::OnlyPrompt`]
    /// for a sequence without tokens after the prompt, if the prompt is excluded.
    pub fn forward(
        &self,
        hidden: &Tensor,
        offsets: &[usize],
        prompts: Option<&[usize]>,
    ) -> Result<Tensor> {
        let (n, e) = hidden.dims2()?;
        mha::check_offsets(offsets, 1, n)?;
        let b = offsets.len() - 1;
        if let Some(prompts) = prompts.filter(|prompts| prompts.len() != b) {
            let (argument, expected) =
                ("prompts", format!("(B,) = [{b}], one number per sequence"));
            return Err(mha::Error::Shape { argument, expected, got: vec![prompts.len()] }.into());
        }
        if b == 0 {
            return Ok(no_rows(self.dimension(e), DType::F32, hidden.device())?);
        }
        let has_prompt = |prompts: &&[usize]| prompts.iter().any(|&tokens| tokens > 0);
        let prompts = prompts.filter(|_| !self.include_prompt).filter(has_prompt);
        let prompt = |i: usize| prompts.map_or(0, |prompts| prompts[i]);
        let sequences = offsets.windows(2).enumerate().map(|(i, w)| {
            let (tokens, prompt) = (w[1] - w[0], prompt(i));
            if prompt < tokens {
                Ok((w[0] + prompt..w[1], prompt))
            } else {
                Err(InputError::OnlyPrompt { tokens }.into())
            }
        });
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        let in_f32 = hidden.to_dtype(DType::F32)?;
        let modes = self.modes.iter().map(|&mode| {
            if mode == PoolingMode::Mean
                && prompts.is_none()
                && let Some(means) = ops::mean_pool(hidden, offsets)?
            {
                return Ok(means);
            }
            let pooled = sequences.iter().map(|(range, prompt)| mode.pool(&in_f32, range, *prompt));
            Ok(Tensor::cat(&pooled.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
        });
        Ok(Tensor::cat(&modes.collect::<Result<Vec<_>>>()?, 1)?)
    }
}

impl PoolingMode {
    /// Pools the tokens in `range` to `(1, E)`. `prompt` tokens of the sequence precede them.
    fn pool(
        self,
        hidden: &Tensor,
        range: &Range<usize>,
        prompt: usize,
    ) -> candle_core::Result<Tensor> {
        let n = range.len();
        let sequence = hidden.narrow(0, range.start, n)?; // (n, E)
        // Division by an f64 in candle multiplies by the reciprocal, which rounds differently.
        let divide = |x: Tensor, by: f32| x.broadcast_div(&Tensor::new(by, x.device())?);
        match self {
            Self::Cls => sequence.narrow(0, 0, 1),
            Self::Max => sequence.max_keepdim(0),
            Self::Mean => divide(sequence.sum_keepdim(0)?, n as f32),
            Self::MeanSqrtLen => divide(sequence.sum_keepdim(0)?, (n as f32).sqrt()),
            Self::WeightedMean => {
                let weights: Vec<f32> = (prompt + 1..=prompt + n).map(|i| i as f32).collect();
                let sum: f32 = weights.iter().sum();
                let weights = Tensor::from_vec(weights, (n, 1), hidden.device())?;
                divide(sequence.broadcast_mul(&weights)?.sum_keepdim(0)?, sum)
            }
            Self::LastToken => sequence.narrow(0, n - 1, 1),
        }
    }
}

/// The keys of the file: one switch per mode, or the names of the modes.
#[derive(Deserialize)]
struct PoolingConfig {
    /// `None` if the key is absent; a null value is an error, as in sentence-transformers.
    #[serde(default, deserialize_with = "not_null")]
    pooling_mode: Option<OneOrMany>,
    pooling_mode_cls_token: Option<bool>,
    pooling_mode_max_tokens: Option<bool>,
    pooling_mode_mean_tokens: Option<bool>,
    pooling_mode_mean_sqrt_len_tokens: Option<bool>,
    pooling_mode_weightedmean_tokens: Option<bool>,
    pooling_mode_lasttoken: Option<bool>,
    #[serde(default = "yes")]
    include_prompt: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

fn yes() -> bool {
    true
}

fn not_null<'de, D: Deserializer<'de>>(
    value: D,
) -> std::result::Result<Option<OneOrMany>, D::Error> {
    OneOrMany::deserialize(value).map(Some)
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a pooling mode or a list of pooling modes")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl PoolingConfig {
    /// The names of the active modes, by default `mean`.
    fn modes(&self) -> Vec<&str> {
        match &self.pooling_mode {
            Some(OneOrMany::One(mode)) => vec![mode],
            Some(OneOrMany::Many(modes)) => modes.iter().map(String::as_str).collect(),
            None => {
                let switches = [
                    self.pooling_mode_cls_token,
                    self.pooling_mode_max_tokens,
                    self.pooling_mode_mean_tokens,
                    self.pooling_mode_mean_sqrt_len_tokens,
                    self.pooling_mode_weightedmean_tokens,
                    self.pooling_mode_lasttoken,
                ];
                let known = PoolingMode::ALL.iter().zip(switches);
                let known = known.filter(|(_, on)| *on == Some(true)).map(|(mode, _)| mode.name());
                let switched_on = |(key, on): (&'_ String, &Value)| -> bool {
                    key.starts_with("pooling_mode_") && *on == Value::Bool(true)
                };
                let unknown = self.rest.iter().filter(|entry| switched_on(*entry));
                let modes: Vec<&str> = known.chain(unknown.map(|(key, _)| key.as_str())).collect();
                if modes.is_empty() { vec!["mean"] } else { modes }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn read(json: &str) -> std::result::Result<Pooling, String> {
        Pooling::from_json(json.as_bytes(), "1_Pooling/config.json").map_err(|e| e.to_string())
    }

    #[test]
    fn switches_and_names_of_modes_are_read() {
        let switches = r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}"#;
        assert_eq!(read(switches), Ok(PoolingMode::Mean.into()));
        assert_eq!(read(r#"{"pooling_mode": "cls"}"#), Ok(PoolingMode::Cls.into()));
        let both = Pooling::new(&[PoolingMode::Max, PoolingMode::LastToken]).unwrap();
        let json = r#"{"pooling_mode": ["max", "lasttoken"], "include_prompt": false}"#;
        assert_eq!(read(json), Ok(both.clone().without_prompt()));
        let json = r#"{"pooling_mode_lasttoken": true, "pooling_mode_max_tokens": true}"#;
        assert_eq!(read(json), Ok(both));
    }

    #[test]
    fn prompts_need_one_number_for_each_sequence() {
        let hidden = Tensor::ones((4, 2), DType::F32, &Device::Cpu).unwrap();
        let pooling = Pooling::from(PoolingMode::Max).without_prompt();
        let error = pooling.forward(&hidden, &[0, 3, 4], Some(&[1])).unwrap_err().to_string();
        let expected =
            "prompts has the wrong shape: expected (B,) = [2], one number per sequence, got [1]";
        assert_eq!(error, expected);
    }

    #[test]
    fn no_sequences_give_no_vectors_in_every_mode() {
        let hidden = Tensor::ones((0, 2), DType::F32, &Device::Cpu).unwrap();
        let both = Pooling::new(&[PoolingMode::Mean, PoolingMode::Max]).unwrap();
        for pooling in [PoolingMode::Mean.into(), PoolingMode::Cls.into(), both] {
            let width = pooling.dimension(2);
            assert_eq!(pooling.forward(&hidden, &[0], None).unwrap().dims(), [0, width]);
        }
    }

    #[test]
    fn null_is_neither_a_mode_nor_a_boolean() {
        for (json, expected) in [
            (
                r#"{"pooling_mode": "cls", "include_prompt": null}"#,
                "include_prompt: invalid type: null, expected a boolean",
            ),
            (
                r#"{"pooling_mode": null, "word_embedding_dimension": 2}"#,
                "pooling_mode: expected a pooling mode or a list of pooling modes",
            ),
        ] {
            let start = "1_Pooling/config.json cannot be parsed: ";
            assert_eq!(read(json), Err(format!("{start}{expected}")));
        }
    }

    #[test]
    fn the_default_mode_of_a_pooling_is_the_mean() {
        for json in [
            r#"{"pooling_mode_mean_tokens": false}"#,
            r#"{"word_embedding_dimension": 2}"#,
            r#"{"embedding_dimension": 2}"#,
        ] {
            assert_eq!(read(json), Ok(PoolingMode::Mean.into()));
        }
    }

    #[test]
    fn a_file_without_a_key_of_a_pooling_is_refused() {
        for json in ["{}", r#"{"hidden_size": 2}"#, r#"{"include_prompt": false}"#] {
            assert_eq!(
                read(json).unwrap_err(),
                "1_Pooling/config.json: pooling_mode none is not supported: expected a \
                 pooling_mode or the embedding_dimension of a Pooling module; check the module's \
                 path in modules.json"
            );
        }
    }

    #[test]
    fn unknown_modes_are_errors_that_name_the_mode() {
        for (json, got) in [
            (r#"{"pooling_mode": ["cls", "median"]}"#, "cls + median"),
            (r#"{"pooling_mode_median": true}"#, "pooling_mode_median"),
            (r#"{"pooling_mode": []}"#, "none"),
        ] {
            assert_eq!(
                read(json),
                Err(format!(
                    "1_Pooling/config.json: pooling_mode {got} is not supported: expected some of \
                     cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken"
                ))
            );
        }
    }

    #[test]
    fn a_sequence_with_only_a_prompt_is_an_error() -> Result<()> {
        let hidden = Tensor::zeros((4, 2), DType::F32, &Device::Cpu)?;
        let pooling = Pooling::from(PoolingMode::Max);
        pooling.forward(&hidden, &[0, 3, 4], Some(&[1, 1]))?;
        let error = pooling.without_prompt().forward(&hidden, &[0, 3, 4], Some(&[1, 1]));
        assert_eq!(
            error.unwrap_err().to_string(),
            "a text has no tokens after its prompt: expected at least 1 (pooling excludes the \
             prompt), got 0 of 1; shorten the prompt"
        );
        Ok(())
    }
}
