//! The `Dense` module of sentence-transformers (folder `2_Dense`): a linear map with activation,
//! applied to pooled vectors.

use candle_core::{Device, Module, Tensor};
use ops::{ComputeType, Linear, Weights};
use serde::Deserialize;

use crate::{
    Activation, ConfigError, Error, Result,
    load::{self, CONFIG, ModelFolder, Read},
};

/// `activation(x·Wᵀ + b)`, plus a residual of x if the config sets one.
///
/// # Source
/// `Dense` of sentence-transformers.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    linear: Linear,
    activation: TorchActivation,
    residual: Residual,
    out_features: usize,
}

/// An activation that a file names by its PyTorch class.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TorchActivation {
    Identity,
    Other(Activation),
}

impl TorchActivation {
    /// The activation of a class such as `torch.nn.modules.activation.Tanh`.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] with `path` and `key` for a class that is not in
    /// [`ACTIVATIONS`].
    pub(crate) fn from_class(class: &str, path: &str, key: &'static str) -> Result<Self> {
        let name = class.strip_prefix("torch.").map(|_| class.rsplit('.').next().unwrap_or(class));
        let known = ACTIVATIONS.iter().find(|(known, _)| Some(*known) == name);
        known.map(|&(_, activation)| activation).ok_or_else(|| {
            Error::unsupported(
                path,
                key,
                "torch.nn's Identity, Sigmoid, Tanh, ReLU, GELU, SiLU or Mish",
                class,
            )
        })
    }

    pub(crate) fn forward(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Identity => Ok(x.clone()),
            Self::Other(activation) => Ok(activation.forward(x)?),
        }
    }
}

/// The residual that is added after the activation: none, x, or a linear map of x.
#[derive(Clone, Debug)]
enum Residual {
    None,
    Input,
    Projected(Linear),
}

/// The last part of a PyTorch class name, and its activation.
const ACTIVATIONS: [(&str, TorchActivation); 7] = [
    ("Identity", TorchActivation::Identity),
    ("Sigmoid", TorchActivation::Other(Activation::Sigmoid)),
    ("Tanh", TorchActivation::Other(Activation::Tanh)),
    ("ReLU", TorchActivation::Other(Activation::Relu)),
    ("GELU", TorchActivation::Other(Activation::Gelu)),
    ("SiLU", TorchActivation::Other(Activation::Silu)),
    ("Mish", TorchActivation::Other(Activation::Mish)),
];

/// The keys of `2_Dense/config.json`.
#[derive(Deserialize)]
struct DenseConfig {
    in_features: usize,
    out_features: usize,
    #[serde(default = "with_bias")]
    bias: bool,
    #[serde(default = "tanh")]
    activation_function: String,
    #[serde(default)]
    use_residual: bool,
}

fn with_bias() -> bool {
    true
}

fn tanh() -> String {
    "torch.nn.Tanh".to_string()
}

impl Dense {
    /// Loads the module of a folder. `width` is the length of its input vectors.
    ///
    /// # Errors
    /// [`crate::FileError::NoFile`] for a missing file; [`crate::FileError::Json`] for a damaged
    /// config; [`ConfigError::Unsupported`] for an activation that is not implemented;
    /// [`ConfigError::Width`] if `in_features` is not `width`; [`crate::CheckpointError::Tensors`]
    /// if the weights do not fit the config.
    pub(crate) fn from_files(
        files: &ModelFolder,
        width: usize,
        read: Read,
        device: &Device,
    ) -> Result<Self> {
        let json = files.need_json(CONFIG, "the sizes of a Dense module")?;
        let (config, path): (DenseConfig, _) = (json.to()?, json.path().to_string());
        if config.in_features != width {
            return Err(
                ConfigError::Width { path, got: config.in_features, expected: width }.into()
            );
        }
        let class = &config.activation_function;
        let activation = TorchActivation::from_class(class, &path, "activation_function")?;
        load::module(files, read, device, |weights| Self::new(&config, activation, weights))
    }

    /// A linear map without activation, of the weight and bias in the file of `files`.
    ///
    /// # Errors
    /// [`crate::FileError`] for a missing or damaged file; [`crate::CheckpointError::Tensors`] if
    /// the weight does not fit the input's length `width`.
    pub(crate) fn from_state_dict(
        files: &ModelFolder,
        width: usize,
        read: Read,
        device: &Device,
    ) -> Result<Self> {
        let out_features = load::rows(files, "weight")?;
        load::module(files, read, device, |weights| {
            Ok(Self {
                linear: Linear::load(ComputeType::F32, width, out_features, true, weights)?,
                activation: TorchActivation::Identity,
                residual: Residual::None,
                out_features,
            })
        })
    }

    fn new(config: &DenseConfig, activation: TorchActivation, weights: Weights) -> Result<Self> {
        let &DenseConfig { in_features: i, out_features: o, bias, use_residual, .. } = config;
        Ok(Self {
            linear: Linear::load(ComputeType::F32, i, o, bias, weights.pp("linear"))?,
            activation,
            residual: match use_residual {
                false => Residual::None,
                true if i == o => Residual::Input,
                true => Residual::Projected(Linear::load(
                    ComputeType::F32,
                    i,
                    o,
                    false,
                    weights.pp("residual"),
                )?),
            },
            out_features: o,
        })
    }

    /// Length of the output vectors.
    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    /// # Shapes
    /// `x`: `(B, in_features)`, f32; returns `(B, out_features)`
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.activation.forward(&self.linear.forward(x)?)?;
        match &self.residual {
            Residual::None => Ok(y),
            Residual::Input => Ok((y + x)?),
            Residual::Projected(linear) => Ok((y + linear.forward(x)?)?),
        }
    }
}
