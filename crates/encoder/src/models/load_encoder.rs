//! Builds an encoder, with or without a head, from a checkpoint's files.

use candle_core::DType;
use ops::Weights;

use crate::{
    Error, Labels, LoadOptions, LoadReport, ModelConfig, Result,
    load::{self, Checkpoint, ModelFolder, Naming, WeightFiles},
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
    let (dtype, compute_type) = options.precision.on(&options.device)?;
    let json = files.config()?;
    let mut config = ModelConfig::read(&json)?;
    config.encoder.compute_type = compute_type;
    if config.is_decoder {
        let expected = match config.architecture() {
            "BERT" => "false (use BertDecoder for decoders)",
            _ => "false",
        };
        return Err(Error::unsupported(json.path(), "is_decoder", expected, "true"));
    }
    let labels = || Labels::read(&json);
    let build = |weights: &WeightFiles, checkpoint: &Checkpoint| {
        let naming = Naming::detect(config.names(), &weights.names(), weights.path())?;
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
