//! What the tokens of a text attend to: tokenize, encode, keep every head's weights.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use mha::{AttentionMask, HeadWeights};

use crate::{
    BertModel, Error, ModelFiles, Precision, Result, TextTokenizer, error::beginning,
    modules::Chain,
};

/// An encoder and its tokenizer, to look at attention.
///
/// # Examples
/// ```
/// use candle_core::Device;
/// use encoder::{AttentionReader, Precision};
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let dir = "weights/all-MiniLM-L6-v2";
/// let reader = AttentionReader::from_dir(dir, Precision::F32, &Device::Cpu)?;
/// let attention = reader.read("I love AI", None)?;
/// assert_eq!(attention.tokens, ["[CLS]", "i", "love", "ai", "[SEP]"]);
/// assert_eq!(attention.weights.dims(), [6, 12, 5, 5]); // (L, H, T, T)
/// let of_love = attention.weights.get(0)?.get(0)?.get(2)?.to_vec1::<f32>()?;
/// assert!((of_love.iter().sum::<f32>() - 1.0).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct AttentionReader {
    model: BertModel,
    tokenizer: TextTokenizer,
}

/// The attention weights of a text.
#[derive(Clone, Debug)]
pub struct TextAttention {
    /// Its T tokens, special ones included, as the vocabulary spells them.
    pub tokens: Vec<String>,
    /// `(L, H, T, T)`, f32, on the CPU: what each token as a query gives to each as a key. Each row
    /// sums to 1.
    pub weights: Tensor,
}

impl AttentionReader {
    /// Loads the encoder and the tokenizer of a folder, with whatever follows the encoder left out.
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
        let files = match files.has("modules.json")? {
            true => Chain::from_files(files)?.transformer,
            false => files.clone(),
        };
        let (model, _report) = BertModel::from_files(&files, precision, device)?;
        let tokenizer = TextTokenizer::from_files(&files, model.config())?;
        Ok(Self { model, tokenizer })
    }

    /// The weights of all layers and heads on a text, or on a pair of texts, cut at the model's
    /// longest sequence.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode`]; [`Error::NoTokens`].
    pub fn read(&self, text: &str, pair: Option<&str>) -> Result<TextAttention> {
        let mut tokens = match pair {
            None => self.tokenizer.encode(&[text])?,
            Some(pair) => self.tokenizer.encode_pairs(&[(text, pair)])?,
        };
        let tokens = tokens.swap_remove(0);
        if tokens.input_ids.is_empty() {
            return Err(Error::NoTokens { text: beginning(text) });
        }
        let device = self.model.device();
        let ids = |ids: &[u32]| Tensor::new(ids, device)?.unsqueeze(0);
        let (input_ids, types) = (ids(&tokens.input_ids)?, ids(&tokens.token_type_ids)?);
        let all = |_| HeadWeights::All;
        let mask = AttentionMask::none();
        let (_, layers) =
            self.model.forward_with_attentions(&input_ids, Some(&types), &mask, all)?;
        let layers: Vec<Tensor> = layers.into_iter().flatten().collect(); // (1, H, T, T) each
        let weights = Tensor::cat(&layers, 0)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let tokens = tokens.input_ids.iter().map(|&id| self.tokenizer.token(id));
        Ok(TextAttention { tokens: tokens.collect(), weights })
    }
}
