//! What the tokens of a text attend to: tokenize, run, keep every head's weights.

use std::{fmt, path::Path};

use candle_core::{DType, Device, Tensor};
use mha::{AttentionMask, HeadWeights};

use crate::{
    BertDecoder, BertModel, DecoderAttentions, EncoderDecoder, Error, GenerateConfig, ModelFiles,
    Precision, Result, TextTokenizer, error::beginning, pipelines::inspect::Family,
    pipelines::modules::transformer, text::prompts::loader,
};

/// Tokens that an encoder-decoder writes at most.
const WRITTEN: usize = 64;

/// A model and its tokenizer, to look at attention.
///
/// # Examples
/// ```
/// use candle_core::Device;
/// use encoder::{AttentionKind, AttentionReader, Precision};
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let dir = "weights/all-MiniLM-L6-v2";
/// let reader = AttentionReader::from_dir(dir, Precision::F32, &Device::Cpu)?;
/// let attention = reader.read("I love AI", None)?.remove(0);
/// assert_eq!(attention.kind, AttentionKind::Encoder);
/// assert_eq!(attention.queries, ["[CLS]", "i", "love", "ai", "[SEP]"]);
/// assert_eq!(attention.weights.dims(), [6, 12, 5, 5]); // (L, H, T, S)
/// let of_love = attention.weights.get(0)?.get(0)?.get(2)?.to_vec1::<f32>()?;
/// assert!((of_love.iter().sum::<f32>() - 1.0).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct AttentionReader {
    model: Model,
    tokenizer: TextTokenizer,
}

#[derive(Clone)]
enum Model {
    Encoder(BertModel),
    Decoder(BertDecoder),
    EncoderDecoder(Box<EncoderDecoder>),
}

/// Which tokens attend to which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Those of an encoder's text to all of it.
    Encoder,
    /// Those of a decoder's text to the ones up to themselves.
    Decoder,
    /// Those of a decoder's text to the encoder's.
    Cross,
}

impl fmt::Display for AttentionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Encoder => "encoder",
            Self::Decoder => "decoder",
            Self::Cross => "cross",
        })
    }
}

/// The attention weights of a text.
#[derive(Clone, Debug)]
pub struct TextAttention {
    /// Of which kind they are.
    pub kind: AttentionKind,
    /// The T tokens that attend, special ones included, as the vocabulary spells them.
    pub queries: Vec<String>,
    /// The S tokens that they attend to: the same, but for cross-attention.
    pub keys: Vec<String>,
    /// `(L, H, T, S)`, f32, on the CPU: what each query gives to each key. Each row sums to 1.
    pub weights: Tensor,
    /// Number of the text's tokens that truncation removed.
    pub truncated: usize,
}

impl AttentionReader {
    /// Loads the model and the tokenizer of a folder: a decoder or an encoder-decoder where its
    /// config says so, or else the encoder, with whatever follows it left out.
    ///
    /// # Errors
    /// Those of [`BertModel::from_dir`] and [`TextTokenizer::from_files`].
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let loader = loader(files)?;
        let files = transformer(files)?;
        let family: Option<Family> = files.json("config.json")?;
        let model = match family {
            Some(family) if family.is_encoder_decoder() => {
                let (model, _report) = EncoderDecoder::from_files(&files, precision, device)?;
                Model::EncoderDecoder(Box::new(model))
            }
            Some(family) if family.is_decoder() => {
                Model::Decoder(BertDecoder::from_files(&files, precision, device)?.0)
            }
            _ => Model::Encoder(BertModel::from_files(&files, precision, device)?.0),
        };
        let config = match &model {
            Model::Encoder(model) => model.config(),
            Model::Decoder(model) => model.config(),
            Model::EncoderDecoder(model) => model.encoder().config(),
        };
        let tokenizer = TextTokenizer::for_loader(&files, config, loader)?;
        Ok(Self { model, tokenizer })
    }

    /// The weights of all layers and heads on a text, cut at the model's longest sequence: of an
    /// encoder [`AttentionKind::Encoder`], also on a pair of texts; of a decoder
    /// [`AttentionKind::Decoder`]; of an encoder-decoder all three kinds, in their order, on a text
    /// and the one that the decoder has written, or where that is none writes itself, greedily.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode`]; [`Error::NoTokens`]; [`Error::SecondText`] for a decoder.
    pub fn read(&self, text: &str, second: Option<&str>) -> Result<Vec<TextAttention>> {
        let mut tokens = match (second, &self.model) {
            (Some(second), Model::Encoder(_)) => self.tokenizer.encode_pairs(&[(text, second)])?,
            (Some(second), Model::Decoder(_)) => {
                return Err(Error::SecondText { text: beginning(second) });
            }
            _ => self.tokenizer.encode(&[text])?,
        };
        let tokens = tokens.swap_remove(0);
        if tokens.input_ids.is_empty() {
            return Err(Error::NoTokens { text: beginning(text) });
        }
        let of = |kind, queries: &[u32], keys: &[u32], layers: &[Tensor]| {
            let weights = Tensor::cat(layers, 0)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
            let spelled = |ids: &[u32]| ids.iter().map(|&id| self.tokenizer.token(id)).collect();
            let (queries, keys) = (spelled(queries), spelled(keys));
            let truncated = tokens.truncated;
            Ok::<_, Error>(TextAttention { kind, queries, keys, weights, truncated })
        };
        let ids = tokens.input_ids.as_slice();
        let row = |ids: &[u32], device| Ok::<_, Error>(Tensor::new(ids, device)?.unsqueeze(0)?);
        match &self.model {
            Model::Encoder(model) => {
                let types = row(&tokens.token_type_ids, model.device())?;
                let (input_ids, all) = (row(ids, model.device())?, |_| HeadWeights::All);
                let mask = AttentionMask::none();
                let (_, layers) =
                    model.forward_with_attentions(&input_ids, Some(&types), &mask, all)?;
                let layers: Vec<Tensor> = layers.into_iter().flatten().collect();
                Ok(vec![of(AttentionKind::Encoder, ids, ids, &layers)?])
            }
            Model::Decoder(model) => {
                let input_ids = row(ids, model.device())?;
                let (_, layers) = model.forward_with_attentions(&input_ids, None, None)?;
                Ok(vec![of(AttentionKind::Decoder, ids, ids, &layers.causal)?])
            }
            Model::EncoderDecoder(model) => {
                let input_ids = row(ids, model.encoder().device())?;
                let written = self.written(model, &input_ids, second)?;
                let decoder_input_ids = row(&written, model.decoder().device())?;
                let (_, encoder, DecoderAttentions { causal, cross }) =
                    model.forward_with_attentions(&input_ids, None, &decoder_input_ids)?;
                Ok(vec![
                    of(AttentionKind::Encoder, ids, ids, &encoder)?,
                    of(AttentionKind::Decoder, &written, &written, &causal)?,
                    of(AttentionKind::Cross, &written, ids, &cross)?,
                ])
            }
        }
    }

    /// What the decoder is given: the tokens of a text after the one that all begin with, or what
    /// it writes.
    fn written(
        &self,
        model: &EncoderDecoder,
        input_ids: &Tensor,
        text: Option<&str>,
    ) -> Result<Vec<u32>> {
        let longest = model.decoder().config().max_position_embeddings;
        let Some(text) = text else {
            let config = GenerateConfig::greedy(longest.min(WRITTEN));
            return Ok(model.generate(input_ids, None, &config)?.swap_remove(0));
        };
        let start = model.config().decoder_start_token_id.ok_or(Error::NoStart)?;
        let mut ids = vec![start];
        ids.extend(self.tokenizer.encode_bare(text)?);
        ids.truncate(longest);
        Ok(ids)
    }
}
