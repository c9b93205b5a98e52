//! From a checkpoint's files to a model: strictly, with one report of all that does not fit.

mod checkpoint;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod names;
mod open;
mod pickle;
mod report;
mod save;
mod weights;

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use checkpoint::Checkpoint;
use names::Naming;
use weights::Weights;

#[cfg(feature = "hub")]
pub use hub::{Fetched, Hub};
pub(crate) use inspect::Family;
pub use inspect::Inspection;
pub use open::ModelFiles;
pub(crate) use open::{parse_json, parse_value};
pub use report::{LoadReport, Mismatched, Missing};
pub(crate) use save::encoder_decoder as save_encoder_decoder;

use crate::{
    BertConfig, BertDecoder, EncoderDecoder, EncoderDecoderConfig, Error, Labels, Precision,
    Result, TextTokenizer, encoder_decoder::GenerationIds, heads::ReadLabels,
    sentence_config::Loader,
};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const GENERATION: &str = "generation_config.json";
/// Low-rank weights beside the model's, as PEFT saves them.
const ADAPTER: &str = "adapter_config.json";

/// An encoder, with or without a head, as `build` makes it.
pub(crate) fn encoder<M>(
    files: &ModelFiles,
    precision: Precision,
    device: &Device,
    build: impl FnOnce(&BertConfig, &ReadLabels, VarBuilder) -> Result<M>,
) -> Result<(M, LoadReport)> {
    let (dtype, format) = precision.on(device)?;
    let (json, path) = (config_json(files)?, files.path(CONFIG));
    let config = BertConfig { format, ..BertConfig::from_json(&json, &path)? };
    if config.is_decoder {
        return Err(unsupported(files, "is_decoder", "false (BertDecoder takes decoders)", true));
    }
    let labels = || Labels::from_json(&json, &path);
    load(files, device, |weights, checkpoint| {
        let naming = Naming::detect(&weights.names(), weights.path())?;
        let model = build(&config, &labels, checkpoint.model(naming, dtype, device));
        Ok((model, checkpoint.report(&[naming])))
    })
}

/// What `load` makes of the weights, and the tokenizer with the settings that `loader` reads. Another
/// thread reads the tokenizer meanwhile; from a hub, one after the other.
pub(crate) fn with_tokenizer<M>(
    files: &ModelFiles,
    loader: Loader,
    load: impl FnOnce() -> Result<M>,
) -> Result<(M, TextTokenizer)> {
    let config = BertConfig::from_json(&config_json(files)?, &files.path(CONFIG))?;
    let tokenizer = || TextTokenizer::for_loader(files, &config, loader);
    if files.are_on_hub() {
        return Ok((load()?, tokenizer()?));
    }
    let mut read = None;
    let model = rayon::in_place_scope(|scope| {
        scope.spawn(|_| read = Some(tokenizer()));
        load()
    });
    Ok((model?, read.unwrap_or_else(tokenizer)?))
}

/// [`BertDecoder::from_files`].
pub(crate) fn decoder(
    files: &ModelFiles,
    precision: Precision,
    device: &Device,
) -> Result<(BertDecoder, LoadReport)> {
    let (dtype, format) = precision.on(device)?;
    let config = BertConfig::from_json(&config_json(files)?, &files.path(CONFIG))?;
    let config = BertConfig { format, ..config };
    if !config.is_decoder {
        return Err(unsupported(files, "is_decoder", "true (BertModel takes encoders)", false));
    }
    load(files, device, |weights, checkpoint| {
        let naming = Naming::detect(&weights.names(), weights.path())?;
        let naming = naming.of_decoder();
        let model = BertDecoder::new(&config, checkpoint.model(naming, dtype, device));
        Ok((model, checkpoint.report(&[naming])))
    })
}

/// [`EncoderDecoder::from_files`].
pub(crate) fn encoder_decoder(
    files: &ModelFiles,
    precision: Precision,
    device: &Device,
) -> Result<(EncoderDecoder, LoadReport)> {
    let (dtype, format) = precision.on(device)?;
    let mut config = EncoderDecoderConfig::from_json(&config_json(files)?, &files.path(CONFIG))?;
    (config.encoder.format, config.decoder.format) = (format, format);
    if let Some(ids) = files.json::<GenerationIds>(GENERATION)? {
        ids.replace(&mut config, &files.path(GENERATION))?;
    }
    load(files, device, |weights, checkpoint| {
        let models = Naming::encoder_decoder(&weights.names(), config.tie_encoder_decoder);
        let [encoder, decoder] = models.map(|naming| checkpoint.model(naming, dtype, device));
        let model = EncoderDecoder::new(&config, encoder, decoder);
        Ok((model, checkpoint.report(&models)))
    })
}

/// What of a file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    All,
    /// Names and shapes alone: what is made of it is right in shape, and takes no memory.
    Header,
}

/// A module that has a folder of its own, in f32 whatever its file has.
pub(crate) fn module<M>(
    files: &ModelFiles,
    read: Read,
    device: &Device,
    build: impl FnOnce(VarBuilder) -> Result<M>,
) -> Result<M> {
    let weights = Arc::new(Weights::open(files)?);
    let (checkpoint, dtype) = match read {
        Read::All => (Checkpoint::new(weights.clone()), DType::F32),
        Read::Header => (Checkpoint::without_data(weights.clone()), DType::F16),
    };
    let (module, _report) = checked(&weights, &checkpoint, device, |_, checkpoint| {
        let module = build(checkpoint.model(Naming::AS_ASKED, dtype, device));
        Ok((module, checkpoint.report(&[Naming::AS_ASKED])))
    })?;
    Ok(module)
}

fn config_json(files: &ModelFiles) -> Result<std::borrow::Cow<'static, [u8]>> {
    files.need(CONFIG, "the model's sizes, in Hugging Face's names")
}

fn unsupported(files: &ModelFiles, key: &'static str, expected: &'static str, got: bool) -> Error {
    Error::Unsupported { path: files.path(CONFIG), key, expected, got: got.to_string() }
}

/// A model built on the weights of files.
fn load<M>(
    files: &ModelFiles,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    if let Some(adapter) = files.json::<serde_json::Value>(ADAPTER)? {
        let (path, expected) = (files.path(ADAPTER), "weights with the adapter merged into them");
        let got = adapter["peft_type"].to_string();
        return Err(Error::Unsupported { path, key: "an adapter of peft_type", expected, got });
    }
    let weights = Arc::new(Weights::open(files)?);
    checked(&weights, &Checkpoint::new(weights.clone()), device, build)
}

/// A model built on weights, if the report has nothing against it: ready for any thread.
fn checked<M>(
    weights: &Weights,
    checkpoint: &Checkpoint,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    let (model, report) = build(weights, checkpoint)?;
    checkpoint.check()?;
    match model {
        // What is not there or misshapen has a stand-in, and so cannot be the cause.
        Err(error) if report.missing.is_empty() && report.mismatched.is_empty() => Err(error),
        _ if !report.is_complete() => Err(Error::Checkpoint(Box::new(report))),
        model => {
            let model = model?;
            // A GPU's threads have a stream each, which does not wait for what this one has sent.
            device.synchronize()?;
            #[cfg(feature = "cuda")]
            if let Device::Cuda(device) = device {
                mha::cuda::keep_memory(device)?;
            }
            Ok((model, report))
        }
    }
}
