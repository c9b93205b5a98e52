//! Builds an encoder, with or without a head, from a checkpoint's files.

use candle_core::DType;
use candle_nn::VarBuilder;

use crate::{
    Labels, LoadOptions, LoadReport, ModelConfig, ModelFiles, Result,
    load::{self, CONFIG, Checkpoint, Naming, Weights, config_json},
    models::{common_keys::refuse, labels::ReadLabels},
};

/// Loads the model that `build` constructs. The arguments of `build` are the config, a function
/// that reads the labels, and the tensors.
///
/// # Errors
/// The errors of [`crate::EncoderModel::from_dir`].
pub(crate) fn load_encoder<M>(
    files: &ModelFiles,
    options: &LoadOptions,
    build: impl FnOnce(&ModelConfig, &ReadLabels, VarBuilder) -> Result<M>,
) -> Result<(M, LoadReport)> {
    let (dtype, compute_type) = options.precision.on(&options.device)?;
    let (json, path) = (config_json(files)?, files.path(CONFIG));
    let mut config = ModelConfig::from_json(&json, &path)?;
    config.encoder.compute_type = compute_type;
    if config.is_decoder {
        let expected = match config.architecture() {
            "BERT" => "false (use BertDecoder for decoders)",
            _ => "false",
        };
        return refuse(&path, "is_decoder", expected, "true");
    }
    let labels = || Labels::from_json(&json, &path);
    let build = |weights: &Weights, checkpoint: &Checkpoint| {
        let naming = Naming::detect(config.names(), &weights.names(), weights.path())?;
        let model =
            build(&config, &labels, checkpoint.model(naming.clone(), dtype, &options.device));
        Ok((model, checkpoint.report(&[naming])))
    };
    match &options.cache {
        Some(cache) if options.device.is_cpu() && dtype == DType::F32 => {
            load::model_with_cache(files, cache, &json, compute_type, build)
        }
        _ => load::model(files, &options.device, build),
    }
}
