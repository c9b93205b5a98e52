//! Text to attention weights: tokenize, run the model, return the weights of every head.

use std::{fmt, path::Path};

use candle_core::{DType, Device, Tensor};
use mha::{AttentionMask, HeadWeights};

use crate::{
    CausalLm, ConfigError, DecoderAttentions, EncoderDecoder, EncoderModel, Error, GenerateConfig,
    InputError, LoadOptions, ModelConfig, ModelFiles, Result, TextTokenizer, error::beginning,
    load::ModelFolder, pipelines::inspect::ArchitectureKeys, pipelines::modules::transformer,
    text::prompts::loader,
};

/// Maximum length of a generated sequence in tokens, start token included.
const MAX_GENERATED: usize = 64;

/// A model and its tokenizer, for attention weights.
///
/// # Examples
/// ```
/// use encoder::{AttentionKind, AttentionReader, LoadOptions};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let reader = AttentionReader::from_dir(dir, &LoadOptions::default())?;
/// let attention = reader.read("I love AI", None)?.remove(0);
/// assert_eq!(attention.kind, AttentionKind::Encoder);
/// assert_eq!(attention.queries, ["[CLS]", "i", "love", "ai", "[SEP]"]);
/// assert_eq!(attention.weights.dims(), [6, 12, 5, 5]); // (L, H, T, S)
/// let of_love = attention.weights.get(0)?.get(0)?.get(2)?.to_vec1::<f32>()?;
/// assert!((of_love.iter().sum::<f32>() - 1.0).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AttentionReader {
    model: Model,
    tokenizer: TextTokenizer,
}

#[derive(Clone, Debug)]
enum Model {
    Encoder(Box<EncoderModel>),
    Decoder(Box<CausalLm>),
    EncoderDecoder(Box<EncoderDecoder>),
}

/// Which tokens are the queries and which are the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Self-attention of an encoder: each token attends to all tokens of its text.
    Encoder,
    /// Causal self-attention of a decoder: each token attends to itself and the tokens before it.
    Decoder,
    /// Cross-attention: each token of the decoder's text attends to all tokens of the encoder's
    /// text.
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
    /// The kind of attention.
    pub kind: AttentionKind,
    /// The T query tokens, special tokens included, in the vocabulary's spelling.
    pub queries: Vec<String>,
    /// The S key tokens. They differ from the queries only in cross-attention.
    pub keys: Vec<String>,
    /// The weight of each key for each query, `(L, H, T, S)`, f32, on the CPU. Each row sums to 1.
    pub weights: Tensor,
    /// Number of tokens that truncation removed from the text of the queries.
    pub queries_truncated: usize,
    /// Number of tokens that truncation removed from the text of the keys.
    pub keys_truncated: usize,
}

/// The token ids of a text, and the number of tokens that truncation removed from it.
#[derive(Clone, Copy)]
struct Text<'a> {
    ids: &'a [u32],
    truncated: usize,
}

impl AttentionReader {
    /// Loads the model and the tokenizer of a folder. `config.json` determines whether the model is
    /// an encoder-decoder, a decoder or an encoder. An encoder is loaded without its head.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`], [`CausalLm::from_dir`] or
    /// [`EncoderDecoder::from_dir`], and of [`TextTokenizer::from_files`].
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &ModelFolder::new(files);
        let loader = loader(files)?;
        let files = transformer(files)?;
        let keys: Option<ArchitectureKeys> = files.json("config.json")?;
        let model = match keys {
            Some(keys) if keys.is_encoder_decoder() => {
                let (model, _report) = EncoderDecoder::load(&files, options)?;
                Model::EncoderDecoder(Box::new(model))
            }
            Some(keys) if keys.is_decoder() => {
                Model::Decoder(Box::new(CausalLm::load(&files, options)?.0))
            }
            _ => Model::Encoder(Box::new(EncoderModel::load(&files, options)?.0)),
        };
        let config = match &model {
            Model::Encoder(_) => ModelConfig::read(&*files.config()?)?,
            Model::Decoder(model) => model.config().clone(),
            Model::EncoderDecoder(model) => (&model.config().encoder).into(),
        };
        let tokenizer = TextTokenizer::for_loader(&files, &config, loader)?;
        Ok(Self { model, tokenizer })
    }

    /// A reader for a loaded encoder. The weights are shared.
    pub fn from_encoder(model: EncoderModel, tokenizer: TextTokenizer) -> Self {
        Self { model: Model::Encoder(Box::new(model)), tokenizer }
    }

    /// The attention weights of all layers and heads for a text. The text is truncated to the
    /// tokenizer's maximum length; the second text of an encoder-decoder is truncated at its end,
    /// to the decoder's number of positions.
    ///
    /// - Encoder: [`AttentionKind::Encoder`]. `second` makes the input a pair of texts.
    /// - Decoder: [`AttentionKind::Decoder`].
    /// - Encoder-decoder: all three kinds in the order of [`AttentionKind`]. The decoder's text is
    ///   `second`, or else the text that the model generates with greedy search.
    ///
    /// # Errors
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no token for a part of a text;
    /// [`InputError::NoTokens`] for a text without tokens; [`ConfigError::NoRoom`] if the maximum
    /// length leaves no room for a pair; [`InputError::SecondText`] if a decoder gets a second
    /// text; [`ConfigError::NoStart`] if the config of an encoder-decoder has no
    /// `decoder_start_token_id`; [`Error::NonFiniteOutput`] if a weight is NaN.
    pub fn read(&self, text: &str, second: Option<&str>) -> Result<Vec<TextAttention>> {
        let mut tokens = match (second, &self.model) {
            (Some(second), Model::Encoder(_)) => self.tokenizer.encode_pairs(&[(text, second)])?,
            (Some(second), Model::Decoder(_)) => {
                return Err(InputError::SecondText { text: beginning(second) }.into());
            }
            _ => self.tokenizer.encode(&[text])?,
        };
        let tokens = tokens.swap_remove(0);
        if tokens.input_ids.is_empty() {
            return Err(InputError::NoTokens { text: beginning(text) }.into());
        }
        let attention = |kind, queries: Text, keys: Text, layers: &[Tensor]| {
            let weights = Tensor::cat(layers, 0)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
            if weights.sum_all()?.to_scalar::<f32>()?.is_nan() {
                return Err(Error::NonFiniteOutput);
            }
            let token_texts =
                |ids: &[u32]| ids.iter().map(|&id| self.tokenizer.token(id)).collect();
            Ok::<_, Error>(TextAttention {
                kind,
                queries: token_texts(queries.ids),
                keys: token_texts(keys.ids),
                weights,
                queries_truncated: queries.truncated,
                keys_truncated: keys.truncated,
            })
        };
        let ids = tokens.input_ids.as_slice();
        let text = Text { ids, truncated: tokens.truncated };
        let row = |ids: &[u32], device| Ok::<_, Error>(Tensor::new(ids, device)?.unsqueeze(0)?);
        match &self.model {
            Model::Encoder(model) => {
                let types = row(&tokens.token_type_ids, model.device())?;
                let (input_ids, all) = (row(ids, model.device())?, |_| HeadWeights::All);
                let mask = AttentionMask::none();
                let (_, layers) =
                    model.forward_with_attentions(&input_ids, Some(&types), &mask, all)?;
                let layers: Vec<Tensor> = layers.into_iter().flatten().collect();
                Ok(vec![attention(AttentionKind::Encoder, text, text, &layers)?])
            }
            Model::Decoder(model) => {
                let input_ids = row(ids, model.device())?;
                let (_, layers) = model.forward_with_attentions(&input_ids, None, None)?;
                Ok(vec![attention(AttentionKind::Decoder, text, text, &layers.causal)?])
            }
            Model::EncoderDecoder(model) => {
                let input_ids = row(ids, model.encoder().device())?;
                let (decoder_ids, truncated) = self.decoder_ids(model, &input_ids, second)?;
                let decoder_text = Text { ids: &decoder_ids, truncated };
                let decoder_input_ids = row(&decoder_ids, model.decoder().device())?;
                let (_, encoder, DecoderAttentions { causal, cross }) =
                    model.forward_with_attentions(&input_ids, None, &decoder_input_ids)?;
                Ok(vec![
                    attention(AttentionKind::Encoder, text, text, &encoder)?,
                    attention(AttentionKind::Decoder, decoder_text, decoder_text, &causal)?,
                    attention(AttentionKind::Cross, decoder_text, text, &cross)?,
                ])
            }
        }
    }

    /// The decoder's input: the start token and the tokens of `text`, or the generated sequence if
    /// there is no text. Also returns the number of the text's tokens that truncation removed.
    fn decoder_ids(
        &self,
        model: &EncoderDecoder,
        input_ids: &Tensor,
        text: Option<&str>,
    ) -> Result<(Vec<u32>, usize)> {
        let max_length = model.decoder().config().encoder.max_tokens();
        let Some(text) = text else {
            let config = GenerateConfig::greedy(max_length.min(MAX_GENERATED));
            return Ok((model.generate(input_ids, None, &config)?.swap_remove(0), 0));
        };
        let start =
            model.config().decoder_start_token_id.ok_or(Error::Config(ConfigError::NoStart))?;
        let mut ids = vec![start];
        ids.extend(self.tokenizer.encode_bare(text)?);
        let truncated = ids.len().saturating_sub(max_length);
        ids.truncate(max_length);
        Ok((ids, truncated))
    }
}
