//! The encoder of any architecture: embeddings, layers, and the pooler if the checkpoint has one.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use mha::{AttentionMask, HeadWeights};
use ops::{CudaGraphCache, Linear, Loaded, Table, Weights};

use crate::{
    Activation, DecoderAttentions, DecoderCache, DecoderMemory, Encoder, EncoderConfig,
    InputEmbeddings, InputError, LoadOptions, LoadReport, ModelFiles, RaggedBatch, Result,
    SequencePooling,
    block::{Prefix, ReadTokens},
    load::ModelFolder,
    models::load_encoder::load_encoder,
    models::ragged_batch::{as_u32, scatter, tables},
    models::shared_prefix::{self, Group, PrefixCache},
};

/// Number of tokens per thread in one part of a batch. Each part passes through all layers before
/// the next part starts. Larger parts make the matrix products more efficient; at this size the
/// activations between the products still fit in the CPU's caches.
const TOKENS_PER_THREAD: usize = 128;

/// Maximum number of keys per token, on average, in one part of a batch of sequences after a prefix.
const KEYS_PER_TOKEN: usize = 8;

/// Maximum number of keys in one part of such a batch.
const MAX_KEYS: usize = 1 << 18;

/// An encoder of any architecture, with or without the pooler.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderModel, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let (model, report) = EncoderModel::from_dir(dir, &LoadOptions::default())?;
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
pub struct EncoderModel {
    config: EncoderConfig,
    embeddings: InputEmbeddings,
    encoder: Encoder,
    pooler: Option<Linear>,
    device: Device,
    graphs: CudaGraphCache,
    prefixes: PrefixCache,
}

/// The output of [`EncoderModel::forward`].
#[derive(Clone, Debug)]
pub struct EncoderOutput {
    /// The output of the last layer, `(B, T, E)`. The rows of padding are zeros.
    pub last_hidden_state: Tensor,
    /// The pooler's output, `(B, E)`: `tanh` of a linear map of the first visible token's hidden
    /// state. `None` if the model has no pooler.
    pub pooler_output: Option<Tensor>,
}

/// The hidden states and attention weights of all layers, from [`EncoderModel::forward_all`].
#[derive(Clone, Debug)]
pub struct EncoderStates {
    /// L + 1 tensors `(B, T, E)`: the embeddings, then the output of each layer. The rows of
    /// padding are zeros.
    pub hidden_states: Vec<Tensor>,
    /// L tensors `(B, H, T, T)`: the weight of each key for each query.
    pub attentions: Vec<Tensor>,
}

impl EncoderModel {
    /// Builds the model from `embeddings` and `encoder` in `weights`, and from `pooler` if
    /// `add_pooling_layer` is true. The tensors in `weights` have this crate's names, which
    /// [`Self::from_dir`] maps to the names in a checkpoint. A model that was trained with a
    /// [`candle_nn::VarMap`] is saved by [`VarMap::save`](candle_nn::VarMap::save), and loaded by
    /// this method from [`VarBuilder::from_mmaped_safetensors`] with the same config.
    ///
    /// [`VarBuilder::from_mmaped_safetensors`]: candle_nn::VarBuilder::from_mmaped_safetensors
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; the errors of [`EncoderConfig::check`].
    pub fn new<'a>(
        config: &EncoderConfig,
        add_pooling_layer: bool,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let e = config.hidden_size;
        let pooler = if add_pooling_layer {
            Some(Linear::load(config.compute_type, e, e, true, weights.pp("pooler"))?)
        } else {
            None
        };
        Ok(Self {
            config: config.clone(),
            embeddings: InputEmbeddings::new(config, weights.pp("embeddings"))?,
            encoder: Encoder::new(config, weights.pp("encoder"))?,
            pooler,
            device: weights.device().clone(),
            graphs: CudaGraphCache::default(),
            prefixes: PrefixCache::default(),
        })
    }

    /// Loads `config.json` and the weights of a folder in Hugging Face's format. The report lists
    /// the loaded tensors. The weights may be stored as f32, f16, bf16 or f64, for every
    /// precision.
    ///
    /// # Errors
    /// - [`crate::FileError::NoFolder`] if the folder does not exist; [`crate::FileError::NoFile`]
    ///   if a file does not exist
    /// - [`crate::FileError::Io`], [`crate::FileError::Json`], [`crate::FileError::Safetensors`],
    ///   [`crate::FileError::Pickle`], [`crate::FileError::LfsPointer`] or
    ///   [`crate::FileError::WebPage`] if a file cannot be read
    /// - [`crate::CheckpointError::ShardName`], [`crate::CheckpointError::NotInShard`] or
    ///   [`crate::CheckpointError::TwoShards`] for an invalid index of shards;
    ///   [`crate::CheckpointError::TwoPrefixes`] for weights of two models
    /// - [`crate::ConfigError::Unsupported`] for a setting in `config.json` that is not
    ///   implemented, or for a folder with an adapter; the errors of [`EncoderConfig::check`]
    /// - [`crate::ConfigError::Precision`] if the device does not support the precision
    /// - [`crate::CheckpointError::Tensors`] with all tensors that are missing, mismatched or
    ///   unexpected
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        Self::load(&ModelFolder::new(files), options)
    }

    /// [`Self::from_files`] for files of which some are already read.
    pub(crate) fn load(files: &ModelFolder, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        load_encoder(files, options, |config, _, weights| {
            Self::new(&config.encoder, has_pooler(&weights), weights)
        })
    }

    /// The config that the model was built from.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of CUDA graphs that the current thread holds for this model; 0 if the device is not a
    /// GPU. A batch of at most 256 tokens is captured in a graph when a batch with the same
    /// sequence lengths was computed before.
    pub fn cuda_graphs(&self) -> usize {
        self.graphs.graphs()
    }

    /// The hidden states of padded sequences, and the pooler's output.
    ///
    /// If `mask` has only padding or valid lengths, the padding tokens are removed before the
    /// computation. All tokens are computed with any other mask, and also if padding lies between
    /// visible tokens and attention depends on distances (rotary positions, ALiBi, relative biases,
    /// disentangled attention, windows). In all cases the hidden states of padding are zeros.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`, integers; without `token_type_ids` all tokens have
    /// type 0
    /// # Errors
    /// - [`mha::Error::DType`] or [`mha::Error::Shape`] if the ids are not integers `(B, T)`, with
    ///   B and T of at least 1
    /// - [`InputError::Id`] if an id is outside its embedding table
    /// - [`InputError::TooLong`] if a sequence has more than [`EncoderConfig::max_tokens`] tokens
    /// - [`InputError::RaggedMask`] for a mask of ragged sequences; [`mha::Error::Shape`] or
    ///   [`mha::Error::ValidLength`] for a mask that does not fit the ids
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<EncoderOutput> {
        let input = Padded::new(&self.config, input_ids, token_type_ids, mask)?;
        self.output(self.hidden(&input, mask)?, &input)
    }

    /// One vector for each padded sequence: that of its first or last visible token, or the mean
    /// over its visible tokens, of the vectors that `of_tokens` computes from the hidden states.
    ///
    /// # Shapes
    /// `of_tokens`: from `(B, T, E)` to `(B, T, W)`; returns `(B, W)`
    /// # Errors
    /// The errors of [`Self::forward`].
    pub(crate) fn forward_pooled(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
        pooling: SequencePooling,
        of_tokens: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let input = Padded::new(&self.config, input_ids, token_type_ids, mask)?;
        let reads_one = matches!(pooling, SequencePooling::Cls | SequencePooling::Last { .. });
        if reads_one && !self.computes_padding(&input)? {
            let (batch, _rows) = input.to_ragged(&self.config, &input.visible)?;
            if batch.offsets().windows(2).all(|at| at[0] < at[1]) {
                return self.forward_pooled_ragged(&batch, pooling, of_tokens);
            }
        }
        let hidden = of_tokens(&self.hidden(&input, mask)?)?;
        match pooling {
            SequencePooling::Cls => input.first_tokens(&hidden),
            SequencePooling::Last { pad_token_id } => input.last_tokens(&hidden, pad_token_id),
            SequencePooling::Mean | SequencePooling::Late => {
                // `of_tokens` may have changed the zeros of padding.
                let hidden = input.hide_padding(hidden)?;
                // For a sequence without visible tokens, the sum 0 is divided by 1.
                let in_sum_dtype = hidden.to_dtype(sum_dtype(hidden.dtype()))?;
                let visible = input.visible.to_device(hidden.device())?;
                let visible = visible.to_dtype(in_sum_dtype.dtype())?;
                let tokens = visible.sum_keepdim(1)?.maximum(1f64)?;
                let means = in_sum_dtype.sum(1)?.broadcast_div(&tokens)?;
                Ok(means.to_dtype(hidden.dtype())?)
            }
        }
    }

    /// Whether padding is computed too, because the hidden states of the tokens would differ without
    /// it.
    fn computes_padding(&self, input: &Padded) -> Result<bool> {
        Ok(!input.hides_only_padding || (self.config.uses_distances() && input.has_gaps()?))
    }

    /// The output of the last layer, `(B, T, E)`. The rows of padding are zeros.
    fn hidden(&self, input: &Padded, mask: &AttentionMask) -> Result<Tensor> {
        if self.computes_padding(input)? {
            return input.hide_padding(self.encoder.forward(&self.embed(input)?, mask)?);
        }
        let (batch, rows) = input.to_ragged(&self.config, &input.visible)?;
        let hidden = self.forward_ragged(&batch)?; // (N, E)
        let hidden = scatter(&hidden, &rows, input.b * input.t)?;
        Ok(hidden.reshape((input.b, input.t, self.config.hidden_size))?)
    }

    /// [`Self::forward`] that also returns the hidden states and attention weights of all layers.
    /// All tokens are computed, padding included, so T is at most [`EncoderConfig::max_tokens`].
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_all(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<(EncoderOutput, EncoderStates)> {
        let input = Padded::new(&self.config, input_ids, token_type_ids, mask)?;
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
        let states = EncoderStates { hidden_states, attentions };
        Ok((self.output(last, &input)?, states))
    }

    /// [`Self::forward`] that also returns the attention weights that `select(i)` selects for layer
    /// `i`. Only these weights are kept in memory. All tokens are computed, padding included, so T
    /// is at most [`EncoderConfig::max_tokens`].
    ///
    /// # Shapes
    /// returns one entry per layer, with the shape that [`HeadWeights`] states
    /// # Errors
    /// The errors of [`Self::forward`]; [`mha::Error::Head`] if `select` names a head that a layer
    /// does not have.
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use encoder::{EncoderModel, LoadOptions};
    /// use mha::{AttentionMask, HeadWeights};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let (model, _) = EncoderModel::from_dir(dir, &LoadOptions::default())?;
    /// let ids = Tensor::new(&[[101u32, 1045, 2293, 9932, 102]], &Cpu)?; // I love AI
    /// let head_3_of_layer_4 = |layer| match layer {
    ///     4 => HeadWeights::Heads(vec![3]),
    ///     _ => HeadWeights::None,
    /// };
    /// let (_, weights) =
    ///     model.forward_with_attentions(&ids, None, &AttentionMask::none(), head_3_of_layer_4)?;
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
    ) -> Result<(EncoderOutput, Vec<Option<Tensor>>)> {
        let input = Padded::new(&self.config, input_ids, token_type_ids, mask)?;
        let mut attentions = vec![];
        let keep_weights = |_: &Tensor, weights| attentions.push(weights);
        let last = self.encoder.forward_with(&self.embed(&input)?, mask, select, keep_weights)?;
        Ok((self.output(input.hide_padding(last)?, &input)?, attentions))
    }

    /// [`CausalLm::cache`](crate::CausalLm::cache)
    pub(crate) fn cache(&self, capacity: usize) -> DecoderCache {
        self.encoder.cache(capacity.min(self.config.max_tokens()))
    }

    /// [`CausalLm::memory`](crate::CausalLm::memory)
    ///
    /// # Errors
    /// The errors of that method.
    pub(crate) fn memory(
        &self,
        encoder_output: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<DecoderMemory> {
        self.encoder.memory(encoder_output, padding)
    }

    /// The hidden states `(B, T, E)` of tokens that follow those in `cache`. Each token attends to
    /// itself and to the tokens before it.
    ///
    /// # Errors
    /// The errors of [`CausalLm::step`](crate::CausalLm::step).
    pub(crate) fn step(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        let x = self.embed_after(input_ids, cache.len())?;
        self.encoder.step(&x, padding, memory, cache)
    }

    /// [`Self::step`] with an empty cache, and the attention weights.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub(crate) fn forward_causal_with_attentions(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
    ) -> Result<(Tensor, DecoderAttentions)> {
        let x = self.embed_after(input_ids, 0)?;
        self.encoder.forward_causal_with_attentions(&x, padding, memory)
    }

    /// The input `(B, T, E)` of the first layer for tokens of type 0. The first has the position
    /// `start`; padding is counted.
    fn embed_after(&self, input_ids: &Tensor, start: usize) -> Result<Tensor> {
        let [words, _types] = tables(&self.config);
        let input_ids = as_u32(input_ids, words)?.to_device(&self.device)?;
        let (b, t) = input_ids.dims2()?;
        let max = self.config.max_tokens();
        if start + t > max {
            return Err(InputError::TooLong { got: start + t, max }.into());
        }
        let positions = Tensor::arange(start as u32, (start + t) as u32, &self.device)?;
        let positions = positions.unsqueeze(0)?.broadcast_as((b, t))?.contiguous()?;
        self.embeddings.forward(&input_ids, &input_ids.zeros_like()?, &positions)
    }

    /// The word embeddings, `(vocab_size, W)`, where W is `embedding_size`.
    pub(crate) fn words(&self) -> Loaded<&Table> {
        self.embeddings.words()
    }

    /// The output of the last layer for ragged sequences.
    ///
    /// # Shapes
    /// returns `(N, E)`
    /// # Errors
    /// [`InputError::Id`] if an id is outside its embedding table; [`InputError::TooLong`] if a
    /// sequence has more than [`EncoderConfig::max_tokens`] tokens.
    pub fn forward_ragged(&self, batch: &RaggedBatch) -> Result<Tensor> {
        self.forward_after(batch, None, None)
    }

    /// [`Self::forward_ragged`] for some of the tokens. The last layer computes only their queries,
    /// and what follows from these; the result is the same.
    ///
    /// # Shapes
    /// `tokens`: indices of tokens of the batch in ascending order, `(R,)`; returns `(R, E)`
    /// # Errors
    /// The errors of [`Self::forward_ragged`].
    pub(crate) fn forward_ragged_tokens(
        &self,
        batch: &RaggedBatch,
        tokens: &[usize],
    ) -> Result<Tensor> {
        self.forward_after(batch, Some(tokens), None)
    }

    /// [`Self::forward_ragged`] for sequences that all continue the same prefix, if there is one.
    /// Returns the hidden states of the tokens after the prefix, or of those in `read`.
    fn forward_after(
        &self,
        batch: &RaggedBatch,
        read: Option<&[usize]>,
        prefix: Option<&Prefix>,
    ) -> Result<Tensor> {
        let read = read.filter(|read| read.len() < batch.tokens());
        if batch.tokens() == 0 || read.is_some_and(|read| read.is_empty()) {
            let dtype = self.embeddings.dtype();
            return Ok(no_rows(self.config.hidden_size, dtype, &self.device)?);
        }
        let encode = |batch: &RaggedBatch, read: Option<ReadTokens>| {
            let ids = batch.ids(&self.config, &self.device)?; // (3, 1, N)
            let sequences = AttentionMask::none();
            let sequences =
                sequences.with_sequences_after(batch.offsets(), prefix.map_or(0, Prefix::len))?;
            let encode = |ids: &Tensor, (mask, read): &(AttentionMask, Option<ReadTokens>)| {
                let x = self.embed_ragged(ids)?;
                Ok(self.encoder.forward_ragged(&x, mask, read.as_ref(), prefix)?.squeeze(0)?)
            };
            let input = (sequences, read);
            if prefix.is_some() {
                return encode(&ids, &input);
            }
            let read = input.1.as_ref().map(ReadTokens::tokens);
            self.graphs.run(batch.offsets(), read, &ids, &input, encode)
        };
        let mut part = self.tokens_per_part();
        if let Some(prefix) = prefix {
            // Each layer holds the keys and values of the prefix once for each sequence.
            let keys = batch.tokens() + batch.sequences() * prefix.len();
            let max_keys = part.saturating_mul(KEYS_PER_TOKEN).min(MAX_KEYS);
            part = part.min((max_keys * batch.tokens()).div_ceil(keys));
        }
        let of_device = |tokens: &[usize]| ReadTokens::new(tokens, &self.device);
        if !self.device.is_cpu() && batch.tokens() <= part {
            return encode(batch, read.map(of_device).transpose()?);
        }
        // All work runs in the rayon pool, so that concurrent callers share the threads of the pool
        // and do not add threads.
        rayon::scope(|_| {
            let (mut start, mut rest, mut hidden) = (0, read, vec![]);
            for part in batch.parts(part) {
                let end = start + part.tokens();
                let of_part = rest.as_mut().map(|rest| {
                    let count = rest.partition_point(|&token| token < end);
                    let tokens = rest.split_off(..count).unwrap_or_default();
                    tokens.iter().map(|token| token - start).collect::<Vec<_>>()
                });
                start = end;
                if of_part.as_ref().is_none_or(|tokens| !tokens.is_empty()) {
                    let of_part = of_part.as_deref().map(of_device).transpose()?;
                    hidden.push(encode(&part, of_part)?);
                }
            }
            Ok(Tensor::cat(&hidden, 0)?)
        })
    }

    /// Maximum number of tokens in one part of a batch.
    fn tokens_per_part(&self) -> usize {
        if self.device.is_cpu() { TOKENS_PER_THREAD * ops::max_threads() } else { usize::MAX }
    }

    /// The hidden state of one token of each sequence: token `at[i]` of sequence i. If the model is
    /// causal, tokens with which several sequences begin are computed once; the result is the same.
    /// `prompts[i]` is the number of tokens at the beginning of sequence i with which sequences of
    /// later calls may begin too.
    ///
    /// # Shapes
    /// `at`, `prompts`: `(B,)`; returns `(B, E)`
    /// # Errors
    /// [`InputError::EmptySequence`] for a sequence without tokens; the errors of
    /// [`Self::forward_ragged`].
    pub(crate) fn forward_ragged_at(
        &self,
        batch: &RaggedBatch,
        at: &[usize],
        prompts: Option<&[usize]>,
    ) -> Result<Tensor> {
        let offsets = batch.offsets();
        if let Some(index) = offsets.windows(2).position(|w| w[0] == w[1]) {
            return Err(InputError::EmptySequence { index }.into());
        }
        let rows = |offsets: &[usize], at: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
            offsets.iter().zip(at).map(|(start, at)| start + at).collect()
        };
        let groups =
            if self.config.shares_prefixes() { self.groups(batch, at, prompts) } else { vec![] };
        if groups.is_empty() {
            return self.forward_ragged_tokens(batch, &rows(offsets, &mut at.iter().copied()));
        }
        batch.ids(&self.config, &Device::Cpu)?; // checks the ids and the lengths
        let (mut order, mut hidden) = (vec![0; batch.sequences()], vec![]);
        let mut computed = 0u32;
        for Group { sequences, prefix } in groups {
            let tokens = &batch.sequence(sequences[0])[..prefix];
            let prefix = match tokens {
                [] => None,
                _ => Some(self.prefixes.get(tokens, sequences.len(), |ids| self.prefix(ids))?),
            };
            let start = prefix.as_ref().map_or(0, Prefix::len);
            let tails = batch.tails(&sequences, start)?;
            let last = rows(tails.offsets(), &mut sequences.iter().map(|&i| at[i] - start));
            hidden.push(self.forward_after(&tails, Some(&last), prefix.as_ref())?);
            for i in sequences {
                order[i] = computed;
                computed += 1;
            }
        }
        Ok(Tensor::cat(&hidden, 0)?.index_select(&Tensor::new(order, &self.device)?, 0)?)
    }

    #[cfg(test)]
    pub(super) fn prefixes(&self) -> &PrefixCache {
        &self.prefixes
    }

    /// The sequences in groups with common prefixes, for [`Self::forward_ragged_at`]; empty if
    /// there are no prefixes.
    fn groups(&self, batch: &RaggedBatch, at: &[usize], prompts: Option<&[usize]>) -> Vec<Group> {
        let most = PrefixCache::max_tokens(self.config.key_value_bytes());
        let sequences: Vec<&[u32]> = (0..batch.sequences()).map(|i| batch.sequence(i)).collect();
        let max: Vec<usize> = at.iter().map(|&at| at.min(most)).collect();
        let mut groups = shared_prefix::groups(&sequences, &max);
        let mut alone = vec![true; sequences.len()];
        groups.iter().flat_map(|group| &group.sequences).for_each(|&i| alone[i] = false);
        let mut without = vec![];
        for i in (0..sequences.len()).filter(|&i| alone[i]) {
            let prompt = prompts.map_or(0, |prompts| prompts[i]).min(max[i]);
            let prefix = self.prefixes.kept(&sequences[i][..max[i]]).max(prompt);
            if prefix > 0 {
                groups.push(Group { sequences: vec![i], prefix });
            } else {
                without.push(i);
            }
        }
        if !groups.is_empty() && !without.is_empty() {
            groups.push(Group { sequences: without, prefix: 0 });
        }
        groups
    }

    /// The keys and values of the first tokens of a sequence.
    pub(super) fn prefix(&self, tokens: &[u32]) -> Result<Prefix> {
        let mut batch = RaggedBatch::default();
        batch.push(tokens, &vec![0; tokens.len()])?;
        let ids = batch.ids(&self.config, &self.device)?;
        let compute = || self.encoder.prefix(&self.embed_ragged(&ids)?);
        if self.device.is_cpu() { rayon::scope(|_| compute()) } else { compute() }
    }

    /// [`Self::forward_ragged`] where all tokens of sequence `i` attend to its first `keys[i]`
    /// tokens only. Consecutive sequences of equal length are computed together.
    ///
    /// # Errors
    /// The errors of [`Self::forward_ragged`].
    pub(crate) fn forward_ragged_to_keys(
        &self,
        batch: &RaggedBatch,
        keys: &[usize],
    ) -> Result<Tensor> {
        let lengths: Vec<usize> = batch.offsets().windows(2).map(|at| at[1] - at[0]).collect();
        if lengths == keys || batch.tokens() == 0 {
            return self.forward_ragged(batch);
        }
        let ids = batch.ids(&self.config, &self.device)?; // (3, 1, N)
        let encode = |start: usize, lengths: &[usize], keys: &[usize]| -> Result<Tensor> {
            let (b, t, e) = (lengths.len(), lengths[0], self.config.hidden_size);
            let x = self.embed_ragged(&ids.narrow(2, start, b * t)?)?.reshape((b, t, e))?;
            let keys = Tensor::from_iter(keys.iter().map(|&n| n as u32), &self.device)?;
            let mask = AttentionMask::none().with_valid_lens(&keys)?;
            Ok(self.encoder.forward(&x, &mask)?.reshape((b * t, e))?)
        };
        let max_tokens = self.tokens_per_part();
        rayon::scope(|_| {
            let (mut hidden, mut first) = (vec![], 0);
            for equal in lengths.chunk_by(|a, b| a == b) {
                for part in equal.chunks((max_tokens / equal[0].max(1)).max(1)) {
                    let range = first..first + part.len();
                    hidden.push(encode(batch.offsets()[first], part, &keys[range.clone()])?);
                    first = range.end;
                }
            }
            Ok(Tensor::cat(&hidden, 0)?)
        })
    }

    /// The embeddings `(1, N, E)` of tokens of a ragged batch. `ids`: `(3, 1, N)`, from
    /// [`RaggedBatch::ids`].
    fn embed_ragged(&self, ids: &Tensor) -> Result<Tensor> {
        self.embeddings.forward(&ids.get(0)?, &ids.get(1)?, &ids.get(2)?)
    }

    /// The embeddings `(B, T, E)` of all tokens, padding included.
    fn embed(&self, input: &Padded) -> Result<Tensor> {
        let all = input.input_ids.ones_like()?.to_dtype(DType::U8)?;
        let (batch, _rows) = input.to_ragged(&self.config, &all)?;
        let ids = batch.ids(&self.config, &self.device)?;
        Ok(self.embed_ragged(&ids)?.reshape((input.b, input.t, self.config.hidden_size))?)
    }

    /// [`Self::forward_pooled`] for ragged sequences.
    ///
    /// # Shapes
    /// `of_tokens`: from `(N, E)` to `(N, W)`; returns `(B, W)`
    /// # Errors
    /// [`InputError::EmptySequence`] for a sequence without tokens; the errors of
    /// [`Self::forward_ragged`].
    pub(crate) fn forward_pooled_ragged(
        &self,
        batch: &RaggedBatch,
        pooling: SequencePooling,
        of_tokens: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let offsets = batch.offsets();
        let at: Vec<usize> = match pooling {
            SequencePooling::Cls => vec![0; batch.sequences()],
            SequencePooling::Last { pad_token_id } => {
                let last = |ids: &[u32]| ids.iter().rposition(|&id| Some(id) != pad_token_id);
                (0..batch.sequences()).map(|i| last(batch.sequence(i)).unwrap_or(0)).collect()
            }
            SequencePooling::Mean | SequencePooling::Late => {
                let is_empty = |sequence: &[usize]| sequence[0] == sequence[1];
                if let Some(index) = offsets.windows(2).position(is_empty) {
                    return Err(InputError::EmptySequence { index }.into());
                }
                let hidden = of_tokens(&self.forward_ragged(batch)?)?; // (N, W)
                if batch.sequences() == 0 {
                    return Ok(hidden); // (0, W)
                }
                let in_sum_dtype = hidden.to_dtype(sum_dtype(hidden.dtype()))?;
                let means =
                    offsets.windows(2).map(|w| in_sum_dtype.narrow(0, w[0], w[1] - w[0])?.mean(0));
                let means = Tensor::stack(&means.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
                return Ok(means.to_dtype(hidden.dtype())?);
            }
        };
        of_tokens(&self.forward_ragged_at(batch, &at, None)?)
    }

    fn output(&self, last_hidden_state: Tensor, input: &Padded) -> Result<EncoderOutput> {
        let pooler_output = match &self.pooler {
            Some(pooler) => {
                let first = input.first_tokens(&last_hidden_state)?;
                Some(pooler.forward_activated(&first, Some(Activation::Tanh))?)
            }
            None => None,
        };
        Ok(EncoderOutput { last_hidden_state, pooler_output })
    }
}

/// A tensor `(0, width)`. One row is allocated, because some GPU drivers refuse an allocation of 0
/// bytes.
pub(crate) fn no_rows(width: usize, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
    Tensor::zeros((1, width), dtype, device)?.narrow(0, 0, 0)
}

/// Whether `weights` have the pooler's weight or bias. If they have only one of them, loading
/// reports the other as missing.
pub(crate) fn has_pooler(weights: &Weights) -> bool {
    ["pooler.weight", "pooler.bias"].iter().any(|name| weights.contains_tensor(name))
}

/// The input of [`EncoderModel::forward`]: padded sequences.
struct Padded {
    input_ids: Tensor,      // (B, T), u32
    token_type_ids: Tensor, // (B, T), u32
    visible: Tensor,        // (B, T), u8; 0 at padding
    /// Whether the mask only hides padding. With any other mask, the padding cannot be left out.
    hides_only_padding: bool,
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
        if mask.is_ragged() {
            return Err(InputError::RaggedMask.into());
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
                    expected: format!("(B, T) = {:?}, the shape of input_ids", [b, t]),
                    got: ids.dims().to_vec(),
                }
                .into());
            }
        };
        Ok(Self {
            visible: mask.unpadded_keys(b, t, input_ids.device())?,
            hides_only_padding: mask.is_padding_alone(),
            input_ids,
            token_type_ids,
            b,
            t,
        })
    }

    /// The tokens whose `visible` is 1. Also returns the row of each of them in the padded hidden
    /// states `(B·T, E)`.
    fn to_ragged(
        &self,
        config: &EncoderConfig,
        visible: &Tensor,
    ) -> Result<(RaggedBatch, Vec<u32>)> {
        RaggedBatch::from_padded(config, &self.input_ids, &self.token_type_ids, visible)
    }

    /// Whether a sequence has padding between visible tokens. Without this padding, the distances
    /// of the tokens are different.
    fn has_gaps(&self) -> Result<bool> {
        let rows = self.visible.to_vec2::<u8>()?;
        Ok(rows.iter().any(|row| row.chunk_by(|a, b| a == b).filter(|run| run[0] == 1).count() > 1))
    }

    /// Sets the rows of padding in `x` `(B, T, E)` to zeros.
    fn hide_padding(&self, x: Tensor) -> Result<Tensor> {
        let visible = self.visible.to_device(x.device())?.unsqueeze(2)?.broadcast_as(x.shape())?;
        Ok(visible.where_cond(&x, &x.zeros_like()?)?)
    }

    /// The rows of `hidden` `(B, T, E)` at the first visible token of each sequence, `(B, E)`.
    fn first_tokens(&self, hidden: &Tensor) -> Result<Tensor> {
        self.tokens(hidden, |visible| visible.iter().position(|&v| v == 1))
    }

    /// [`Self::first_tokens`] for the last visible tokens with another id than `pad_token_id`.
    fn last_tokens(&self, hidden: &Tensor, pad_token_id: Option<u32>) -> Result<Tensor> {
        let ids = self.input_ids.to_vec2::<u32>()?;
        let mut ids = ids.iter();
        self.tokens(hidden, |visible| {
            ids.next()?
                .iter()
                .zip(visible)
                .rposition(|(&id, &v)| v == 1 && Some(id) != pad_token_id)
        })
    }

    /// The rows of `hidden` `(B, T, E)` at the token that `find` selects in each sequence, `(B, E)`;
    /// at the first token of a sequence where it selects none.
    fn tokens(
        &self,
        hidden: &Tensor,
        mut find: impl FnMut(&[u8]) -> Option<usize>,
    ) -> Result<Tensor> {
        let mut rows: Vec<u32> = (0..self.b).map(|i| (i * self.t) as u32).collect();
        for (row, visible) in rows.iter_mut().zip(self.visible.to_vec2::<u8>()?) {
            *row += find(&visible).unwrap_or(0) as u32;
        }
        let rows = Tensor::from_vec(rows, self.b, hidden.device())?;
        Ok(hidden.flatten_to(1)?.contiguous()?.index_select(&rows, 0)?)
    }
}

/// The dtype in which hidden states are summed: f32 for half types, which candle sums in their own
/// precision.
fn sum_dtype(hidden: DType) -> DType {
    if hidden == DType::F64 { DType::F64 } else { DType::F32 }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Precision;

    /// Sequences of 1, 5, 17 and 30 tokens.
    fn batch(config: &EncoderConfig) -> Result<RaggedBatch> {
        let mut batch = RaggedBatch::default();
        for length in [1, 5, 17, 30] {
            let length = length.min(config.max_tokens());
            let ids =
                (0..length as u32).map(|i| 1 + (7 * i + i * i) % (config.vocab_size as u32 - 1));
            batch.push(&ids.collect::<Vec<_>>(), &vec![0; length])?;
        }
        Ok(batch)
    }

    fn bits(x: &Tensor) -> Result<Vec<Vec<u32>>> {
        let rows = x.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        Ok(rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect())
    }

    /// The last layer computes the first, the last, some or no tokens of the sequences of every
    /// architecture, with the bits that it computes for all tokens.
    #[test]
    fn the_hidden_states_of_some_tokens_have_the_bits_of_those_of_all() -> Result<()> {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
        let mut models = 0;
        for dir in ["architectures", "decoders"] {
            for entry in fs::read_dir(format!("{golden}/{dir}")).unwrap() {
                let dir = entry.unwrap().path().join("encoder");
                if !dir.join("model.safetensors").exists() {
                    continue;
                }
                for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
                    let options = LoadOptions::default().with_precision(precision);
                    let (model, _) = EncoderModel::from_dir(&dir, &options)?;
                    let batch = batch(model.config())?;
                    let all = bits(&model.forward_ragged(&batch)?)?;
                    let offsets = batch.offsets();
                    let first = offsets[..4].to_vec();
                    let last = offsets[1..].iter().map(|end| end - 1).collect();
                    let some = (0..batch.tokens()).filter(|i| i % 7 < 2 && *i > 3).collect();
                    for tokens in [first, last, some, vec![], vec![3]] {
                        let got = bits(&model.forward_ragged_tokens(&batch, &tokens)?)?;
                        let expected: Vec<_> = tokens.iter().map(|&i| all[i].clone()).collect();
                        assert!(got == expected, "{} {precision:?} {tokens:?}", dir.display());
                    }
                }
                models += 1;
            }
        }
        assert!(models > 40, "{models}");
        Ok(())
    }
}
