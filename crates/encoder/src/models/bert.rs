//! BERT: embeddings, encoder, and the pooler where the checkpoint has one.
//! Devlin et al. 2019, <https://arxiv.org/abs/1810.04805>.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, HeadWeights, Linear, ops::CudaGraphCache};

use crate::{
    BertConfig, Encoder, EncoderConfig, Error, InputEmbeddings, LoadReport, ModelFiles,
    PackedBatch, Precision, Result,
    models::load_encoder::load_encoder,
    text::packing::{as_u32, scatter, tables},
};

/// Tokens for each thread that go through all layers before the next: enough for the products, few
/// enough that the caches hold what lies between these.
const TOKENS_AT_ONCE: usize = 128;

/// The BERT encoder.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{BertModel, Precision};
/// use mha::AttentionMask;
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let dir = "weights/all-MiniLM-L6-v2";
/// let (model, report) = BertModel::from_dir(dir, Precision::F32, &Cpu)?;
/// assert_eq!(report.parameters, 22_713_216);
///
/// // [CLS] hello [SEP], then padding
/// let input_ids = Tensor::new(&[[101u32, 7592, 102, 0]], &Cpu)?;
/// let mask = AttentionMask::none().with_padding(&Tensor::new(&[[1u8, 1, 1, 0]], &Cpu)?)?;
/// let out = model.forward(&input_ids, None, &mask)?;
/// assert_eq!(out.last_hidden_state.dims(), [1, 4, 384]);
/// assert_eq!(out.pooler_output.unwrap().dims(), [1, 384]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BertModel {
    config: BertConfig,
    encoder_config: EncoderConfig,
    embeddings: InputEmbeddings,
    encoder: Encoder,
    pooler: Option<Linear>,
    device: Device,
    graphs: CudaGraphCache,
}

/// What [`BertModel::forward`] gives.
#[derive(Clone, Debug)]
pub struct BertOutput {
    /// `(B, T, E)`: the last layer's output; zeros at padding.
    pub last_hidden_state: Tensor,
    /// `(B, E)`: `tanh` of a linear map of each sequence's first visible token, where the
    /// checkpoint has the map.
    pub pooler_output: Option<Tensor>,
}

/// What [`BertModel::forward_all`] gives besides.
#[derive(Clone, Debug)]
pub struct BertStates {
    /// L + 1 times `(B, T, E)`: the embeddings, then each layer's output; zeros at padding.
    pub hidden_states: Vec<Tensor>,
    /// L times `(B, H, T, T)`: the weight that each query gives to each key.
    pub attentions: Vec<Tensor>,
}

impl BertModel {
    /// The model whose `embeddings`, `encoder` and, with `add_pooling_layer`, `pooler` are in
    /// `vb`, in this crate's names. [`Self::from_dir`] translates a checkpoint's.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape; sizes that do not fit together.
    pub fn new(config: &BertConfig, add_pooling_layer: bool, vb: VarBuilder) -> Result<Self> {
        let encoder_config = config.encoder_config();
        encoder_config.check()?;
        let e = config.hidden_size;
        let pooler = match add_pooling_layer {
            true => Some(Linear::load(config.compute_type, e, e, true, vb.pp("pooler"))?),
            false => None,
        };
        Ok(Self {
            config: config.clone(),
            embeddings: InputEmbeddings::new(&encoder_config, vb.pp("embeddings"))?,
            encoder: Encoder::new(&encoder_config, vb.pp("encoder"))?,
            encoder_config,
            pooler,
            device: vb.device().clone(),
            graphs: CudaGraphCache::default(),
        })
    }

    /// Loads `config.json` and `model.safetensors` of a folder, in Hugging Face's names, and
    /// tells what was loaded. The file may hold f32, f16, bf16 or f64, whatever is computed in.
    ///
    /// # Errors
    /// A file that is missing or damaged; a config that asks for what is not computed here;
    /// [`crate::Error::Checkpoint`] with all tensors that are missing, unexpected or of
    /// another shape.
    pub fn from_dir(
        dir: impl AsRef<Path>,
        precision: Precision,
        device: &Device,
    ) -> Result<(Self, LoadReport)> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(
        files: &ModelFiles,
        precision: Precision,
        device: &Device,
    ) -> Result<(Self, LoadReport)> {
        load_encoder(files, precision, device, |config, _, vb| {
            Self::new(config, has_pooler(&vb), vb)
        })
    }

    /// The sizes it was built from.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of CUDA graphs that the current thread holds for this model; 0 on another device than a
    /// GPU. A batch of at most 256 tokens is captured when its sequence lengths come a second time.
    pub fn cuda_graphs(&self) -> usize {
        self.graphs.graphs()
    }

    /// Hidden states of padded sequences. Padding is not computed: what `mask` hides from every
    /// query of its sequence is left out, and comes back as zeros.
    ///
    /// # Shapes
    /// - `input_ids`, `token_type_ids`: `(B, T)`, integers; without the latter all tokens are of
    ///   type 0
    /// # Errors
    /// An id without a row in its table; a sequence longer than there are positions; a mask of
    /// another shape, or of packed sequences ([`Error::PackedMask`]).
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<BertOutput> {
        let input = Padded::new(&self.encoder_config, input_ids, token_type_ids, mask)?;
        let hidden = match input.packs {
            true => {
                let (batch, rows) = input.pack(&input.visible)?;
                let hidden = self.forward_packed(&batch)?; // (N, E)
                scatter(&hidden, &rows, input.b * input.t)?.reshape((
                    input.b,
                    input.t,
                    self.config.hidden_size,
                ))?
            }
            false => input.hide_padding(self.encoder.forward(&self.embed(&input)?, mask)?)?,
        };
        self.output(hidden, &input)
    }

    /// [`Self::forward`] with all that happened on the way; every token is computed.
    ///
    /// # Errors
    /// as there.
    pub fn forward_all(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<(BertOutput, BertStates)> {
        let input = Padded::new(&self.encoder_config, input_ids, token_type_ids, mask)?;
        let x = self.embed(&input)?;
        let (mut hidden_states, mut attentions) = (vec![x.clone()], vec![]);
        self.encoder.forward_with(
            &x,
            mask,
            |_| HeadWeights::All,
            |x, weights| {
                hidden_states.push(x.clone());
                attentions.extend(weights);
            },
        )?;
        let hidden_states = hidden_states.into_iter().map(|x| input.hide_padding(x));
        let hidden_states = hidden_states.collect::<Result<Vec<_>>>()?;
        let last = hidden_states[hidden_states.len() - 1].clone();
        let states = BertStates { hidden_states, attentions };
        Ok((self.output(last, &input)?, states))
    }

    /// [`Self::forward`] with some of the attention weights, and no others in memory: `select`
    /// chooses for the layer of that number.
    ///
    /// # Shapes
    /// as there, and L times the weights as [`HeadWeights`] says
    /// # Errors
    /// as there; [`mha::Error::Head`] for a head that is not there.
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use encoder::{BertModel, Precision};
    /// use mha::{AttentionMask, HeadWeights};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let dir = "weights/all-MiniLM-L6-v2";
    /// let (model, _) = BertModel::from_dir(dir, Precision::F32, &Cpu)?;
    /// let ids = Tensor::new(&[[101u32, 1045, 2293, 9932, 102]], &Cpu)?; // I love AI
    /// let third_head_of_layer_4 = |layer| match layer {
    ///     4 => HeadWeights::Heads(vec![3]),
    ///     _ => HeadWeights::None,
    /// };
    /// let (_, weights) =
    ///     model.forward_with_attentions(&ids, None, &AttentionMask::none(), third_head_of_layer_4)?;
    /// assert_eq!(weights.iter().flatten().count(), 1);
    /// assert_eq!(weights[4].as_ref().unwrap().dims(), [1, 1, 5, 5]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn forward_with_attentions(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
        select: impl Fn(usize) -> HeadWeights,
    ) -> Result<(BertOutput, Vec<Option<Tensor>>)> {
        let input = Padded::new(&self.encoder_config, input_ids, token_type_ids, mask)?;
        let mut attentions = vec![];
        let see = |_: &Tensor, weights| attentions.push(weights);
        let last = self.encoder.forward_with(&self.embed(&input)?, mask, select, see)?;
        Ok((self.output(input.hide_padding(last)?, &input)?, attentions))
    }

    /// The word embeddings, `(vocab_size, E)`.
    pub(crate) fn words(&self) -> Result<Tensor> {
        self.embeddings.words()
    }

    /// The last hidden states of packed sequences: what [`Self::forward`] does once the padding
    /// is gone.
    ///
    /// # Shapes
    /// returns `(N, E)`
    /// # Errors
    /// An id without a row in its table; a sequence longer than there are positions.
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        if batch.tokens() == 0 {
            let dtype = self.embeddings.dtype();
            return Ok(Tensor::zeros((0, self.config.hidden_size), dtype, &self.device)?);
        }
        let encode = |batch: &PackedBatch| {
            let ids = batch.ids(&self.encoder_config, &self.device)?; // (3, 1, N)
            self.graphs.run(batch.offsets(), &ids, |ids, mask| {
                Ok(self.encoder.forward(&self.embed_packed(ids)?, mask)?.squeeze(0)?)
            })
        };
        if !self.device.is_cpu() {
            return encode(batch);
        }
        // All work runs inside the rayon pool: the number of computing threads is that of the pool,
        // however many threads call this.
        rayon::scope(|_| {
            let parts = batch.parts(TOKENS_AT_ONCE * rayon::current_num_threads());
            let hidden = parts.map(|part| encode(&part)).collect::<Result<Vec<_>>>()?;
            Ok(Tensor::cat(&hidden, 0)?)
        })
    }

    /// Ids `(3, 1, N)` to `(1, N, E)`.
    fn embed_packed(&self, ids: &Tensor) -> Result<Tensor> {
        self.embeddings.forward(&ids.get(0)?, &ids.get(1)?, &ids.get(2)?)
    }

    /// `(B, T, E)`, padding too
    fn embed(&self, input: &Padded) -> Result<Tensor> {
        let (everything, _rows) = input.pack(&input.input_ids.ones_like()?.to_dtype(DType::U8)?)?;
        let ids = everything.ids(&self.encoder_config, &self.device)?;
        Ok(self.embed_packed(&ids)?.reshape((input.b, input.t, self.config.hidden_size))?)
    }

    /// The pooler's output for packed sequences, none of them empty, if there is a pooler.
    ///
    /// # Shapes
    /// returns `(B, E)`
    /// # Errors
    /// [`Error::EmptySequence`] for a sequence without a first token.
    pub(crate) fn pool_packed(&self, batch: &PackedBatch) -> Result<Option<Tensor>> {
        let is_empty = |sequence: &[usize]| sequence[0] == sequence[1];
        if let Some(index) = batch.offsets().windows(2).position(is_empty) {
            return Err(Error::EmptySequence { index });
        }
        let hidden = self.forward_packed(batch)?; // (N, E)
        self.pool(|| {
            let starts = &batch.offsets()[..batch.offsets().len() - 1];
            let starts: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
            let starts = Tensor::new(starts, hidden.device())?;
            Ok(hidden.index_select(&starts, 0)?)
        })
    }

    /// `tanh` of a linear map of the sequences' first tokens `(B, E)`, which only a pooler wants.
    fn pool(&self, first: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        let pooled = |pooler: &Linear| Ok(pooler.forward(&first()?)?.tanh()?);
        self.pooler.as_ref().map(pooled).transpose()
    }

    fn output(&self, last_hidden_state: Tensor, input: &Padded) -> Result<BertOutput> {
        let pooler_output = self.pool(|| input.first_tokens(&last_hidden_state))?;
        Ok(BertOutput { last_hidden_state, pooler_output })
    }
}

/// Whether there is a pooler to ask for.
pub(crate) fn has_pooler(vb: &VarBuilder) -> bool {
    ["pooler.weight", "pooler.bias"].iter().any(|name| vb.contains_tensor(name))
}

/// Padded sequences as a caller brings them.
struct Padded {
    input_ids: Tensor,      // (B, T), u32
    token_type_ids: Tensor, // (B, T), u32
    /// `(B, T)` of u8: 0 where a token is padding.
    visible: Tensor,
    /// The mask does no more than hide padding.
    packs: bool,
    b: usize,
    t: usize,
}

impl Padded {
    fn new(
        config: &EncoderConfig,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Self> {
        if mask.is_packed() {
            return Err(Error::PackedMask);
        }
        let [words, types] = tables(config);
        let input_ids = as_u32(input_ids, words)?;
        let (b, t) = input_ids.dims2()?;
        let token_type_ids = match token_type_ids {
            None => input_ids.zeros_like()?,
            Some(ids) if ids.dims() == [b, t] => as_u32(ids, types)?,
            Some(ids) => {
                return Err(mha::Error::Shape {
                    argument: "token_type_ids",
                    expected: format!("(B, T) = {:?}, as input_ids", [b, t]),
                    got: ids.dims().to_vec(),
                }
                .into());
            }
        };
        Ok(Self {
            visible: mask.unpadded_keys(b, t, input_ids.device())?,
            packs: mask.is_padding_alone(),
            input_ids,
            token_type_ids,
            b,
            t,
        })
    }

    /// The tokens that are `visible`, and where each was.
    fn pack(&self, visible: &Tensor) -> Result<(PackedBatch, Vec<u32>)> {
        PackedBatch::from_padded(&self.input_ids, &self.token_type_ids, visible)
    }

    /// `x` `(B, T, E)` with zeros at padding.
    fn hide_padding(&self, x: Tensor) -> Result<Tensor> {
        let visible = self.visible.to_device(x.device())?.unsqueeze(2)?.broadcast_as(x.shape())?;
        Ok(visible.where_cond(&x, &x.zeros_like()?)?)
    }

    /// `(B, E)`: `hidden` `(B, T, E)` at the first visible token of each sequence.
    fn first_tokens(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut rows: Vec<u32> = (0..self.b).map(|i| (i * self.t) as u32).collect();
        for (row, visible) in rows.iter_mut().zip(self.visible.to_vec2::<u8>()?) {
            *row += visible.iter().position(|&v| v == 1).unwrap_or(0) as u32;
        }
        let rows = Tensor::from_vec(rows, self.b, hidden.device())?;
        Ok(hidden.flatten_to(1)?.contiguous()?.index_select(&rows, 0)?)
    }
}
