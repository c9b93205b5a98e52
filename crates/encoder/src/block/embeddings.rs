//! The input embeddings of an encoder.

use candle_core::{DType, Tensor};
use ops::{Linear, Loaded, NotLoaded, Table, Weights, loaded};

use crate::{EncoderConfig, Positions, Result, block::norm::Norm};

/// The sum of the word, token type and position embeddings, then a normalisation and a projection
/// to `hidden_size`: `projection(norm(scale · word + token_type + position))`. The config determines which
/// of these parts exist. Without a projection, the width W of the tables is E.
///
/// # Examples
/// Without token types, with W = E = 2:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarBuilder;
/// use encoder::{EncoderConfig, InputEmbeddings};
///
/// let tensors = [
///     ("word_embeddings.weight", Tensor::new(&[[0f32, 0.], [5., 1.]], &Cpu)?),
///     ("position_embeddings.weight", Tensor::new(&[[0f32, 0.], [0., 8.]], &Cpu)?),
///     ("norm.weight", Tensor::new(&[1f32, 1.], &Cpu)?),
///     ("norm.bias", Tensor::new(&[0f32, 10.], &Cpu)?),
/// ];
/// let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor)).into();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
/// let mut config = EncoderConfig::new(2, 2, 1, 1, 8); // vocabulary, E, layers, heads, F
/// config.max_position_embeddings = 2;
/// config.embeddings.type_vocab_size = None;
/// let embeddings = InputEmbeddings::new(&config, vb)?;
///
/// let ids = Tensor::new(&[[1u32, 1]], &Cpu)?;
/// let positions = Tensor::new(&[[0u32, 1]], &Cpu)?;
/// let x = embeddings.forward(&ids, &ids.zeros_like()?, &positions)?;
/// // norm([5, 1]) and norm([5, 9]), plus the bias
/// assert_eq!(x.to_vec3::<f32>()?, [[[1., 9.], [-1., 11.]]]);
/// # Ok::<(), encoder::Error>(())
/// ```
/// # Source
/// Devlin et al. 2019, figure 2, <https://arxiv.org/abs/1810.04805>; the projection: Lan et al.
/// 2020, section 3.1, <https://arxiv.org/abs/1909.11942>.
#[derive(Clone, Debug)]
pub struct InputEmbeddings {
    words: Loaded<Table>,             // (vocab_size, W)
    types: Option<Loaded<Table>>,     // (type_vocab_size, W)
    positions: Option<Loaded<Table>>, // (max_position_embeddings, W)
    norm: Option<Norm>,
    projection: Option<Linear>,
    /// A factor of the word embeddings, for a module without other tables.
    scale: Option<f64>,
    dtype: DType,
}

impl InputEmbeddings {
    /// Builds the module from `word_embeddings` in `weights`, and from `token_type_embeddings`,
    /// `position_embeddings`, `norm` and `projection` if the config has these parts.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::check`]; [`crate::Error::Attention`] or
    /// [`crate::Error::Candle`] if `weights` lack a tensor or have it in another shape.
    pub fn new<'a>(config: &EncoderConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let width = config.embedding_size();
        let table =
            |name, rows| weights.get((rows, width), name).map(|table| table.map(Table::from));
        let words = Table::load(config.vocab_size, width, weights.pp("word_embeddings"));
        let words = loaded(words)?;
        let types = match config.embeddings.type_vocab_size {
            Some(rows) => Some(table("token_type_embeddings.weight", rows)?),
            None => None,
        };
        let positions = match config.positions {
            Positions::Learned { .. } => {
                Some(table("position_embeddings.weight", config.max_position_embeddings)?)
            }
            _ => None,
        };
        let projection = match config.embeddings.embedding_size {
            Some(_) => {
                let (e, weights) = (config.hidden_size, weights.pp("projection"));
                Some(Linear::load(config.compute_type, width, e, true, weights)?)
            }
            None => None,
        };
        let norm = if config.embeddings.norm {
            Some(Norm::new(config, width, weights.pp("norm"))?)
        } else {
            None
        };
        let (scale, dtype) = (config.embeddings.scale, weights.dtype());
        Ok(Self { words, types, positions, norm, projection, scale, dtype })
    }

    /// The word embeddings, `(vocab_size, W)`.
    pub(crate) fn words(&self) -> Loaded<&Table> {
        self.words.as_ref().map_err(Clone::clone)
    }

    /// The dtype of the hidden states.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The input of the first layer. `token_type_ids` and `position_ids` are ignored if the module
    /// has no table for them.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`, `position_ids`: `(B, T)`, u32; returns `(B, T, E)`
    /// # Errors
    /// [`mha::Error::Candle`] if an id is not below the number of rows of its table. On a GPU, the
    /// token may get a row of NaN instead.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        position_ids: &Tensor,
    ) -> Result<Tensor> {
        let tables = [
            (Some(&self.words), input_ids),
            (self.types.as_ref(), token_type_ids),
            (self.positions.as_ref(), position_ids),
        ];
        let tables = tables.into_iter().filter_map(|(table, ids)| Some((table?, ids)));
        let tables = tables.map(|(table, ids)| Ok((table.as_ref()?, ids)));
        let lookups = tables.collect::<std::result::Result<Vec<_>, &NotLoaded>>();
        let lookups = lookups.map_err(|tensor| ops::Error::from(tensor.clone()))?;
        let embedded = match &self.norm {
            Some(Norm::Layer(norm)) if self.scale.is_none() => {
                ops::embed(&lookups, Some(norm), self.dtype)?
            }
            norm => {
                let mut sum = ops::embed(&lookups, None, self.dtype)?;
                if let Some(scale) = self.scale {
                    sum = (sum * scale)?;
                }
                match norm {
                    Some(norm) => candle_core::Module::forward(norm, &sum)?,
                    None => sum,
                }
            }
        }; // (B, T, W)
        match &self.projection {
            Some(projection) => Ok(projection.forward(&embedded)?),
            None => Ok(embedded),
        }
    }
}
