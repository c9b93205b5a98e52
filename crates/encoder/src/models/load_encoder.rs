//! Builds an encoder, with or without a head, from a checkpoint's files.

use candle_core::DType;
use ops::Weights;

use crate::{
    Error, Labels, LoadOptions, LoadReport, ModelConfig, Result,
    load::{self, Checkpoint, Json, ModelFolder, Naming, WeightFiles},
    models::labels::ReadLabels,
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
    if config.is_decoder {
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
    if !config.encoder.causal {
        let (key, expected) = match config.architecture() {
            "BERT" => ("is_decoder", "true (use EncoderModel for encoders)"),
            _ => ("architecture", "a causal one"),
        };
        let got = if key == "is_decoder" { "false" } else { config.architecture() };
        return Err(Error::unsupported(json.path(), key, expected, got));
    }
    load_with(files, options, &json, config, build)
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
        if config.is_decoder {
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
