//! A whole BERT encoder, from token ids to hidden states, in candle operations.
//!
//! Start here to learn how BERT works. The rest of this crate computes the same result faster and
//! for more architectures; the tests compare both. Attention is [`mha::reference`].
//!
//! Devlin et al. 2018, <https://arxiv.org/abs/1810.04805>.

use std::collections::HashMap;

use candle_core::{D, DType, Module, Result, Tensor};
use mha::reference::multi_head_attention;

use crate::BertConfig;

/// The embeddings and the output of each layer: L + 1 hidden states, the last of which is the
/// result.
///
/// `tensors` are those of a checkpoint without a prefix, such as
/// `encoder.layer.0.attention.self.query.weight`, all of one float dtype. `config` gives the number
/// of layers and of heads, the activation and the epsilon of LayerNorm. `padding` is 1 for the
/// tokens that may be attended to; each sequence must have at least one. Unlike
/// [`EncoderModel`](crate::EncoderModel), this function computes values for padding too.
///
/// # Shapes
/// `input_ids`, `token_type_ids`, `padding`: `(B, T)`; returns L + 1 tensors `(B, T, E)`
/// # Errors
/// candle's error if a tensor is missing, or if the shapes do not match.
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, IndexOp, Tensor, safetensors};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let mut tensors = safetensors::load(format!("{dir}/model.safetensors"), &Cpu)?;
/// for tensor in tensors.values_mut() {
///     *tensor = tensor.to_dtype(DType::F32)?; // f16 in the file
/// }
/// let config = std::fs::read(format!("{dir}/config.json"))?;
/// let config: encoder::BertConfig = serde_json::from_slice(&config)?;
///
/// let ids = Tensor::new(&[[101u32, 1045, 2293, 9932, 102]], &Cpu)?; // "I love AI"
/// let (types, padding) = (ids.zeros_like()?, ids.ones_like()?);
/// let hidden = encoder::reference::bert(&tensors, &config, &ids, &types, &padding)?;
/// assert_eq!(hidden.len(), 7); // the embeddings, and six layers
/// assert_eq!(hidden[6].dims(), [1, 5, 384]);
/// let first = hidden[6].i((0, 0, 0))?.to_scalar::<f32>()?;
/// assert!((first - -0.246_849).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn bert(
    tensors: &HashMap<String, Tensor>,
    config: &BertConfig,
    input_ids: &Tensor,
    token_type_ids: &Tensor,
    padding: &Tensor,
) -> Result<Vec<Tensor>> {
    let bert = Bert { tensors, config };
    let keep = padding.to_dtype(DType::U8)?.unsqueeze(1)?.unsqueeze(1)?; // (B, 1, 1, S)
    let mut hidden = vec![bert.embeddings(input_ids, token_type_ids)?]; // (B, T, E)
    for i in 0..config.num_hidden_layers {
        hidden.push(bert.layer(&format!("encoder.layer.{i}"), &hidden[i], &keep)?);
    }
    Ok(hidden)
}

struct Bert<'a> {
    tensors: &'a HashMap<String, Tensor>,
    config: &'a BertConfig,
}

impl Bert<'_> {
    /// The sum of the word's, the position's and the type's embedding, normalised.
    fn embeddings(&self, ids: &Tensor, types: &Tensor) -> Result<Tensor> {
        let embed = |name: &str, ids: &Tensor| {
            let table = self.tensor(&format!("embeddings.{name}_embeddings.weight"))?;
            let shape = [ids.dims(), &[table.dim(1)?]].concat();
            table.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
        };
        let positions = Tensor::arange(0u32, ids.dim(1)? as u32, ids.device())?; // (T,)
        let words = (embed("word", ids)? + embed("token_type", types)?)?; // (B, T, E)
        self.layer_norm("embeddings", &words.broadcast_add(&embed("position", &positions)?)?)
    }

    /// Self-attention, then a feed-forward network; each is added to its input and normalised.
    fn layer(&self, name: &str, x: &Tensor, keep: &Tensor) -> Result<Tensor> {
        // 1. Attention between the tokens.
        let projection = |part: &str| self.weight_and_bias(&format!("{name}.attention.{part}"));
        let projections = [
            projection("self.query")?,
            projection("self.key")?,
            projection("self.value")?,
            projection("output.dense")?,
        ];
        let heads = self.config.num_attention_heads;
        let (attended, _) = multi_head_attention(x, x, &projections, heads, Some(keep))?;
        let x = self.layer_norm(&format!("{name}.attention.output"), &(x + attended)?)?;

        // 2. A feed-forward network at each token.
        let inner = self.linear(&format!("{name}.intermediate.dense"), &x)?; // (B, T, F)
        let inner = self.config.hidden_act.forward(&inner)?;
        let outer = self.linear(&format!("{name}.output.dense"), &inner)?; // (B, T, E)
        self.layer_norm(&format!("{name}.output"), &(x + outer)?)
    }

    /// `x·Wᵀ + b`.
    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.weight_and_bias(name)?;
        x.broadcast_matmul(&weight.t()?)?.broadcast_add(&bias)
    }

    /// `(x − mean) / √(variance + ε) · weight + bias` of each token.
    fn layer_norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.weight_and_bias(&format!("{name}.LayerNorm"))?;
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?; // (B, T, 1)
        let deviation = (variance + self.config.layer_norm_eps)?.sqrt()?;
        centred.broadcast_div(&deviation)?.broadcast_mul(&weight)?.broadcast_add(&bias)
    }

    fn weight_and_bias(&self, name: &str) -> Result<(Tensor, Tensor)> {
        let tensor = |part: &str| self.tensor(&format!("{name}.{part}")).cloned();
        Ok((tensor("weight")?, tensor("bias")?))
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        let missing = || candle_core::Error::CannotFindTensor { path: name.to_string() }.bt();
        self.tensors.get(name).ok_or_else(missing)
    }
}
