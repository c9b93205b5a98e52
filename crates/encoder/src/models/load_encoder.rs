//! Builds an encoder, with or without a head, from a checkpoint's files.

use candle_core::DType;
use ops::Weights;

use crate::{
    Error, Labels, LoadOptions, LoadReport, ModelConfig, Result,
    load::{self, Checkpoint, Json, ModelFolder, Naming, WeightFiles},
    models::{bert::BERT, labels::ReadLabels},
};

/// Loads the model that `build` constructs. The arguments of `build` are the config, a function
/// that reads the labels, and the tensors.
///
/// # Errors
/// The errors of [`crate::EncoderModel::from_dir`].
pub(crate) fn load_encoder<M>(
    files: &ModelFolder,
    options: &LoadOptions,
    build: impl FnOnce(&ModelConfig, &ReadLabels, Weights) -> Result<M>,
) -> Result<(M, LoadReport)> {
    let json = files.config()?;
    let config = ModelConfig::read(&json)?;
    if config.is_decoder && !config.is_of_decoders() {
        let expected = match config.architecture() {
            "BERT" => "false (use CausalLm for decoders)",
            _ => "false",
        };
        return Err(Error::unsupported(json.path(), "is_decoder", expected, "true"));
    }
    load_with(files, options, &json, config, build)
}

/// [`load_encoder`] for a decoder.
///
/// # Errors
/// The errors of [`crate::CausalLm::from_dir`].
pub(crate) fn load_decoder<M>(
    files: &ModelFolder,
    options: &LoadOptions,
    build: impl FnOnce(&ModelConfig, &ReadLabels, Weights) -> Result<M>,
) -> Result<(M, LoadReport)> {
    let json = files.config()?;
    let config = ModelConfig::read(&json)?;
    let is_bert = config.architecture() == BERT.name;
    if config.is_decoder && !is_bert && !config.is_of_decoders() {
        return Err(Error::unsupported(json.path(), "is_decoder", "false", "true"));
    }
    if !config.encoder.causal {
        let (key, expected, got) = match config.architecture() {
            "BERT" => ("is_decoder", "true (use EncoderModel for encoders)", "false"),
            _ => not_causal(&json, config.architecture())?,
        };
        return Err(Error::unsupported(json.path(), key, expected, got));
    }
    load_with(files, options, &json, config, build)
}

/// The key of a model whose attention is not causal, the expected value of the key, and its value,
/// for an error.
///
/// # Errors
/// [`crate::FileError::Json`] for a key of the wrong type.
pub(crate) fn not_causal(
    json: &Json,
    architecture: &'static str,
) -> Result<(&'static str, &'static str, &'static str)> {
    #[derive(serde::Deserialize)]
    struct Keys {
        is_causal: Option<bool>,
        use_bidirectional_attention: Option<bool>,
    }
    let keys: Keys = json.to()?;
    Ok(if keys.is_causal == Some(false) {
        ("is_causal", "true, for a causal language model", "false")
    } else if keys.use_bidirectional_attention == Some(true) {
        ("use_bidirectional_attention", "false, for a causal language model", "true")
    } else {
        ("model_type", "a causal language model", architecture)
    })
}

fn load_with<M>(
    files: &ModelFolder,
    options: &LoadOptions,
    json: &Json,
    mut config: ModelConfig,
    build: impl FnOnce(&ModelConfig, &ReadLabels, Weights) -> Result<M>,
) -> Result<(M, LoadReport)> {
    let (dtype, compute_type) = options.precision.on(&options.device)?;
    config.encoder.compute_type = compute_type;
    let labels = || Labels::read(json);
    let build = |weights: &WeightFiles, checkpoint: &Checkpoint| {
        let mut naming = Naming::detect(config.names(), &weights.names(), weights.path())?;
        if config.is_decoder && config.architecture() == BERT.name {
            naming = naming.of_decoder();
        }
        let model =
            build(&config, &labels, checkpoint.model(naming.clone(), dtype, &options.device));
        Ok((model, checkpoint.report(&[naming])))
    };
    match &options.cache {
        Some(cache) if options.device.is_cpu() && dtype == DType::F32 => {
            load::model_with_cache(files, cache, json.text(), compute_type, build)
        }
        _ => load::model(files, &options.device, build),
    }
}
