//! From the hidden states of a sequence to one vector, as `1_Pooling/config.json` says.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use mha::cpu;
use mha_kernels::{Isa, mean_pool};
use serde::Deserialize;

use crate::{Error, Result, load::parse_json};

/// How the hidden states of a sequence become one vector.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::Pooling;
///
/// // Two packed sequences, of two tokens and of one.
/// let hidden = Tensor::new(&[[1f32, 8.], [3., 4.], [5., 6.]], &Cpu)?;
/// let pool = |pooling: Pooling| pooling.forward(&hidden, &[0, 2, 3])?.to_vec2::<f32>();
/// assert_eq!(pool(Pooling::Mean)?, [[2., 6.], [5., 6.]]);
/// assert_eq!(pool(Pooling::Cls)?, [[1., 8.], [5., 6.]]);
/// assert_eq!(pool(Pooling::Max)?, [[3., 8.], [5., 6.]]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over the tokens.
    Mean,
    /// The first token, `[CLS]`.
    Cls,
    /// The largest value over the tokens.
    Max,
}

impl Pooling {
    /// Reads a `1_Pooling/config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Json`] if it is none; [`Error::Unsupported`] unless it asks for one of these.
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        let config: PoolingConfig = parse_json(json, path)?;
        let modes = config.modes();
        match modes[..] {
            ["mean"] => Ok(Self::Mean),
            ["cls"] => Ok(Self::Cls),
            ["max"] => Ok(Self::Max),
            _ => Err(Error::Unsupported {
                path: path.to_string(),
                key: "pooling mode",
                expected: "one of mean, cls and max",
                got: match modes[..] {
                    [] => "none".to_string(),
                    _ => modes.join(" + "),
                },
            }),
        }
    }

    /// # Shapes
    /// `hidden`: `(N, E)`, packed, none of the B sequences empty; `offsets`: where each begins,
    /// then N; returns `(B, E)`
    /// # Errors
    /// [`mha::Error::Offsets`] if the offsets are not of these tokens.
    pub fn forward(self, hidden: &Tensor, offsets: &[usize]) -> Result<Tensor> {
        let (n, _e) = hidden.dims2()?;
        let rises = offsets.windows(2).all(|w| w[0] < w[1]);
        if !rises || offsets.first() != Some(&0) || offsets.last() != Some(&n) {
            let (got, tokens) = (offsets.to_vec(), n);
            return Err(mha::Error::Offsets { got, tokens }.into());
        }
        if self == Self::Mean && cpu::takes(&[hidden]) {
            let offsets = offsets.to_vec();
            let op = MeanPool { offsets, isa: Isa::get().map_err(mha::Error::from)? };
            return Ok(hidden.contiguous()?.apply_op1_no_bwd(&op)?);
        }
        let pooled = offsets.windows(2).map(|w| {
            let sequence = hidden.narrow(0, w[0], w[1] - w[0])?; // (L, E)
            match self {
                Self::Mean => sequence.mean_keepdim(0),
                Self::Cls => sequence.narrow(0, 0, 1),
                Self::Max => sequence.max_keepdim(0),
            }
        });
        Ok(Tensor::cat(&pooled.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    }
}

/// [`mean_pool`] as an operation on tensors.
struct MeanPool {
    offsets: Vec<usize>,
    isa: Isa,
}

impl CustomOp1 for MeanPool {
    fn name(&self) -> &'static str {
        "mean pool"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_n, e) = layout.shape().dims2()?;
        let pooled = mean_pool(self.isa, cpu::contiguous(x, layout)?, e, &self.offsets);
        Ok((CpuStorage::F32(pooled), (self.offsets.len() - 1, e).into()))
    }
}

/// The file as sentence-transformers writes it: one switch a mode, or the modes' names.
#[derive(Deserialize)]
struct PoolingConfig {
    pooling_mode: Option<OneOrMany>,
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
    #[serde(default)]
    pooling_mode_weightedmean_tokens: bool,
    #[serde(default)]
    pooling_mode_lasttoken: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl PoolingConfig {
    fn modes(&self) -> Vec<&str> {
        match &self.pooling_mode {
            Some(OneOrMany::One(mode)) => vec![mode],
            Some(OneOrMany::Many(modes)) => modes.iter().map(String::as_str).collect(),
            None => [
                (self.pooling_mode_cls_token, "cls"),
                (self.pooling_mode_max_tokens, "max"),
                (self.pooling_mode_mean_tokens, "mean"),
                (self.pooling_mode_mean_sqrt_len_tokens, "mean_sqrt_len_tokens"),
                (self.pooling_mode_weightedmean_tokens, "weightedmean"),
                (self.pooling_mode_lasttoken, "lasttoken"),
            ]
            .into_iter()
            .filter_map(|(on, mode)| on.then_some(mode))
            .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> std::result::Result<Pooling, String> {
        Pooling::from_json(json.as_bytes(), "1_Pooling/config.json").map_err(|e| e.to_string())
    }

    #[test]
    fn both_spellings_are_read() {
        let switches = r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}"#;
        assert_eq!(read(switches), Ok(Pooling::Mean));
        assert_eq!(read(r#"{"pooling_mode": "cls"}"#), Ok(Pooling::Cls));
        assert_eq!(read(r#"{"pooling_mode": ["max"]}"#), Ok(Pooling::Max));
    }

    #[test]
    fn other_modes_are_refused_by_name() {
        for (json, got) in [
            (r#"{"pooling_mode": ["cls", "mean"]}"#, "cls + mean"),
            (r#"{"pooling_mode_lasttoken": true}"#, "lasttoken"),
            ("{}", "none"),
        ] {
            assert_eq!(
                read(json),
                Err(format!(
                    "1_Pooling/config.json asks for pooling mode {got}: expected one of mean, cls \
                     and max, which is all that is computed here"
                ))
            );
        }
    }
}
