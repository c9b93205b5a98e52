//! Multi-head attention, the core of self-, causal and cross-attention:
//! `concat(head₁, .., head_H)·W_O` with `headᵢ = attend(Q·W_Qᵢ, K·W_Kᵢ, V·W_Vᵢ)`. `reference.rs`
//! computes the same in 40 lines. Vaswani et al. 2017, section 3.2.2,
//! <https://arxiv.org/abs/1706.03762>.

use std::{collections::HashMap, fmt};

use candle_core::Tensor;
use ops::{Linear, Loaded, Weights};

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, DisentangledPositions, Error, HeadNorms,
    HeadWeights, LoweredMask, Memory, QueryKeyTransform, Result,
    head_norms::queries_and_keys,
    sdpa::{self, Scoring},
    shape::{check_qkv, expect_dims, expect_rank, shape_error},
};

/// Multi-head attention with its four projections:
/// `concat(head₁, .., head_H)·W_O` with `headᵢ = attend(Q·W_Qᵢ, K·W_Kᵢ, V·W_Vᵢ)`.
///
/// # Examples
/// Hidden size 100, 5 heads; 2 sequences of 4 queries and 6 keys, of which 3 and 2 are valid. The
/// values of the other keys do not affect the output:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, AttentionMask, MultiHeadAttention};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
/// let attention = MultiHeadAttention::new(&AttentionConfig::new(100, 5), vb)?;
///
/// let query = Tensor::randn(0f32, 1., (2, 4, 100), &Cpu)?;
/// let key = Tensor::randn(0f32, 1., (2, 6, 100), &Cpu)?;
/// let mask = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 2], &Cpu)?)?;
/// let out = attention.forward(&query, &key, &key, &mask)?;
/// assert_eq!(out.dims(), [2, 4, 100]);
///
/// let rest = Tensor::full(1e9f32, (2, 3, 100), &Cpu)?;
/// let other = Tensor::cat(&[&key.narrow(1, 0, 3)?, &rest], 1)?;
/// let same = attention.forward(&query, &other, &other, &mask)?;
/// let first = |x: &Tensor| x.get(0)?.sum_all()?.to_scalar::<f32>();
/// assert_eq!(first(&out)?, first(&same)?);
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// Vaswani et al. 2017, section 3.2.2, <https://arxiv.org/abs/1706.03762>. [`crate::reference`]
/// computes the same in 40 lines.
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    config: AttentionConfig,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// `query`, `key` and `value` as one linear map, for a single product on a GPU.
    joined: Option<Linear>,
    /// The normalisations of queries and keys, if the config has a `query_key_norm`.
    norms: Option<Loaded<HeadNorms>>,
}

impl MultiHeadAttention {
    /// Loads the projections `query`, `key`, `value` and `output` from `weights`: each has a
    /// `weight`
    /// `(out, in)` and, if `config.bias` enables it, a `bias` `(out,)`. If the config has a
    /// `query_key_norm`, also loads `query_norm.weight` and `key_norm.weight`, each `(D,)`.
    ///
    /// # Errors
    /// The errors of [`AttentionConfig::check`] and [`Linear::new`]; [`Error::Candle`] if `weights`
    /// lack a tensor or have it in another shape.
    pub fn new<'a>(config: &AttentionConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        config.check()?;
        let weights = weights.into();
        let [query, key, value, output] = config.projections().map(|p| {
            Linear::load(config.compute_type, p.input, p.output, p.bias, weights.pp(p.name))
        });
        let norms = config.query_key_norm;
        let norms = norms.map(|norm| HeadNorms::load(config.head_dim(), norm, &weights));
        let (maps, joined) = if config.has_one_width() {
            Linear::joined([query?, key?, value?])?
        } else {
            ([query?, key?, value?], None)
        };
        let [query, key, value] = maps;
        let (output, norms) = (output?, norms.transpose()?);
        Ok(Self { config: *config, query, key, value, output, joined, norms })
    }

    /// The config that the module was built from.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The module's tensors under the names that [`Self::new`] reads.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor cannot be created.
    pub fn tensors(&self) -> Result<HashMap<String, Tensor>> {
        let mut tensors = HashMap::new();
        for (name, linear) in self.named_projections() {
            tensors.insert(format!("{name}.weight"), linear.weight()?);
            if let Some(bias) = linear.bias()? {
                tensors.insert(format!("{name}.bias"), bias);
            }
        }
        if let Some(norms) = self.norms()? {
            let named = norms.tensors();
            tensors.extend(named.map(|(name, weight)| (name.to_string(), weight.clone())));
        }
        Ok(tensors)
    }

    /// The normalisations of queries and keys, if the module has them.
    ///
    /// # Errors
    /// [`ops::Error::NotLoaded`] if their weights are not loaded.
    fn norms(&self) -> Result<Option<&HeadNorms>> {
        let norms = self.norms.as_ref().map(Loaded::as_ref).transpose();
        Ok(norms.map_err(|tensor| ops::Error::from(tensor.clone()))?)
    }

    fn named_projections(&self) -> [(&'static str, &Linear); 4] {
        let Self { query, key, value, output, .. } = self;
        [("query", query), ("key", key), ("value", value), ("output", output)]
    }

    /// Multi-head attention: each query's weighted sum of values, projected.
    ///
    /// # Shapes
    /// - `query`: `(B, T, E)`; `key`: `(B, S, kdim)`; `value`: `(B, S, vdim)`; returns `(B, T, E)`
    /// - `kdim` and `vdim` are E unless the config sets them
    /// # Errors
    /// [`Error::Shape`], naming the argument, if the shapes do not match; [`ops::Error::DType`]
    /// if a projection does not support the dtype of its input, see [`Linear::forward`];
    /// [`Error::Offset`] or [`Error::ValidLength`] if the mask does not fit T and S;
    /// [`ops::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let options = AttentionOptions::default();
        Ok(self.forward_with(query, key, value, mask, options)?.0)
    }

    /// [`Self::forward`] and the attention weights of each head.
    ///
    /// # Shapes
    /// as [`Self::forward`]; the weights are `(B, H, T, S)`, and each row sums to 1 (times the
    /// head's factor in a head mask), or to 0 if no key is visible
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask,
    ) -> Result<(Tensor, Tensor)> {
        let (q, memory) = self.project(query, key, value, &AttentionOptions::default())?;
        self.attend_with_weights(&q, &memory, &memory.lower(mask, &q)?, None)
    }

    /// [`Self::forward`] with [`AttentionOptions`]: returned weights, dropout, a transformation of
    /// queries and keys, and relative positions.
    ///
    /// # Shapes
    /// as [`Self::forward`]; [`HeadWeights`] lists the shapes of the weights
    /// # Errors
    /// The errors of [`Self::forward`] and of the transformation; [`Error::Head`] for a head that
    /// does not exist.
    pub fn forward_with(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (q, memory) = self.project(query, key, value, &options)?;
        self.attend(&q, &memory, &memory.lower(mask, &q)?, options)
    }

    /// [`Self::forward_with`] with a mask that was lowered before, for scores of B, T and S of the
    /// inputs and H of the module. Several layers can use it.
    ///
    /// # Errors
    /// The errors of [`Self::forward_with`]; [`Error::Shape`] if the mask was lowered for another
    /// shape.
    pub fn forward_lowered(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &LoweredMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (q, memory) = self.project(query, key, value, &options)?;
        self.attend(&q, &memory, mask, options)
    }

    /// Returns a module without the given heads. It can be saved and loaded with its
    /// [`Self::tensors`] and [`Self::config`].
    ///
    /// # Errors
    /// [`Error::Head`] for a head that does not exist; [`Error::NoHeadLeft`] if no head would be
    /// left; [`Error::UnequalGroups`] if the groups of heads that share keys and values would
    /// differ in size.
    ///
    /// # Source
    /// Michel et al. 2019, <https://arxiv.org/abs/1905.10650>.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mha::{AttentionConfig, AttentionMask, MultiHeadAttention};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
    /// let attention = MultiHeadAttention::new(&AttentionConfig::new(12, 3), vb)?;
    /// let pruned = attention.prune_heads(&[1])?;
    /// assert_eq!(pruned.to_string(), "MultiHeadAttention(hidden_size 12, 2 heads of 4)");
    ///
    /// // The pruned module equals the whole module with head 1 masked.
    /// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
    /// let mask = AttentionMask::none().with_head_mask(&Tensor::new(&[1f32, 0., 1.], &Cpu)?)?;
    /// let expected = attention.forward(&x, &x, &x, &mask)?;
    /// let got = pruned.forward(&x, &x, &x, &AttentionMask::none())?;
    /// let is_close = (got - expected)?.abs()?.lt(1e-5)?; // 0 for NaN
    /// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn prune_heads(&self, heads: &[usize]) -> Result<Self> {
        let config = &self.config;
        let all = config.num_attention_heads;
        let left: Vec<usize> = (0..all).filter(|head| !heads.contains(head)).collect();
        if let Some(&head) = heads.iter().find(|&&head| head >= all) {
            return Err(Error::Head { head, heads: all });
        }
        if left.is_empty() {
            return Err(Error::NoHeadLeft { heads: all });
        }
        let group = all / config.num_key_value_heads;
        let mut groups: Vec<usize> = left.iter().map(|head| head / group).collect();
        groups.dedup();
        let size = |g: &usize| left.iter().filter(|&head| head / group == *g).count();
        let sizes: Vec<usize> = groups.iter().map(size).collect();
        if sizes.iter().any(|&size| size != sizes[0]) {
            return Err(Error::UnequalGroups { got: sizes });
        }
        let (d, value_d) = (config.head_dim(), config.value_head_dim());
        let rows = |linear: &Linear, heads: &[usize], d: usize| -> Result<Linear> {
            let weight = linear.weight()?;
            let index = head_rows(heads, d, &weight)?;
            let bias = linear.bias()?.map(|bias| bias.index_select(&index, 0)).transpose()?;
            let weight = weight.contiguous()?.index_select(&index, 0)?;
            Ok(Linear::new(config.compute_type, weight, bias)?)
        };
        let output = self.output.weight()?.contiguous()?;
        let output = output.index_select(&head_rows(&left, value_d, &output)?, 1)?;
        Ok(Self {
            query: rows(&self.query, &left, d)?,
            key: rows(&self.key, &groups, d)?,
            value: rows(&self.value, &groups, value_d)?,
            output: Linear::new(config.compute_type, output, self.output.bias()?)?,
            joined: None,
            norms: self.norms.clone(),
            config: AttentionConfig {
                num_attention_heads: left.len(),
                num_key_value_heads: groups.len(),
                head_dim: Some(d),
                value_head_dim: Some(value_d),
                ..*config
            },
        })
    }

    /// Projects queries, keys and values, normalises queries and keys if the config says so, and
    /// transforms them. The projections of the same tensor are one product if `kdim` and `vdim` are
    /// E, the values of a head are as wide as its keys, and the projections are joined or run on the
    /// CPU kernel.
    pub(crate) fn project(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: &AttentionOptions,
    ) -> Result<(Tensor, Memory)> {
        let &AttentionOptions { transform, query_transform, .. } = options;
        let is_self_attention = query.id() == key.id() && key.id() == value.id();
        if is_self_attention
            && query_transform.is_none()
            && self.config.has_one_width()
            && let Some(projected) = self.project_together(query, transform)?
        {
            return Ok(projected);
        }
        let q = self.project_query(query, query_transform.or(transform))?;
        let memory = self.project_memory(key, value, transform)?;
        if key.dim(0)? != query.dim(0)? {
            let expected = format!("(B, S, kdim) with B = {}, as the query", query.dim(0)?);
            return Err(shape_error("key", key, expected));
        }
        Ok((q, memory))
    }

    /// Projects `x` `(B, T, E)` to queries, keys and values in one product, and normalises and
    /// transforms queries and keys; `None` if the projections are not joined and the CPU kernel does
    /// not support them or `x`.
    fn project_together(
        &self,
        x: &Tensor,
        transform: Option<&dyn QueryKeyTransform>,
    ) -> Result<Option<(Tensor, Memory)>> {
        expect_rank("query", x, 3, "(B, T, E)")?;
        let (b, t) = first_two_dims(x);
        expect_dims("query", x, &[b, t, self.config.hidden_size], "(B, T, E)")?;
        let qkv = match &self.joined {
            Some(joined) => Some(joined.forward_for_attention(x)?),
            None => Linear::forward_all_for_attention([&self.query, &self.key, &self.value], x)?,
        };
        let Some(qkv) = qkv else { return Ok(None) };
        let (h, g) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let heads = split(&qkv, self.config.head_dim())?; // (B, H+2G, T, D)
        let v = heads.narrow(1, h + g, g)?;
        let (q, k) = self.normalise(&heads.narrow(1, 0, h + g)?, h, transform)?;
        Ok(Some((q, Memory::new(k, v))))
    }

    /// Normalises heads of queries and keys if the config says so, and transforms them. They are
    /// those of [`QueryKeyTransform::query_and_key`].
    fn normalise(
        &self,
        heads: &Tensor,
        h: usize,
        transform: Option<&dyn QueryKeyTransform>,
    ) -> Result<(Tensor, Tensor)> {
        let norms = self.norms()?;
        match transform {
            None => queries_and_keys(heads, h, norms),
            Some(transform) => transform.query_and_key(heads, h, norms),
        }
    }

    /// Projects the queries of all heads, `(B, H, T, D)`, normalises them if the config says so, and
    /// transforms them.
    pub(crate) fn project_query(
        &self,
        query: &Tensor,
        transform: Option<&dyn QueryKeyTransform>,
    ) -> Result<Tensor> {
        expect_rank("query", query, 3, "(B, T, E)")?;
        let (b, t) = first_two_dims(query);
        expect_dims("query", query, &[b, t, self.config.hidden_size], "(B, T, E)")?;
        let q = split(&self.query.forward_for_attention(query)?, self.config.head_dim())?;
        Ok(self.normalise(&q, self.config.num_attention_heads, transform)?.0)
    }

    /// Projects the keys `(B, G, S, D)` and the values `(B, G, S, V)` of all heads, normalises the
    /// keys if the config says so, and transforms them.
    pub(crate) fn project_memory(
        &self,
        key: &Tensor,
        value: &Tensor,
        transform: Option<&dyn QueryKeyTransform>,
    ) -> Result<Memory> {
        let config = &self.config;
        expect_rank("key", key, 3, "(B, S, kdim)")?;
        let (b, s) = first_two_dims(key);
        let kdim = config.kdim.unwrap_or(config.hidden_size);
        let vdim = config.vdim.unwrap_or(config.hidden_size);
        expect_dims("key", key, &[b, s, kdim], "(B, S, kdim)")?;
        expect_dims("value", value, &[b, s, vdim], "(B, S, vdim)")?;
        let together = if key.id() == value.id() && config.has_one_width() {
            Linear::forward_all_for_attention([&self.key, &self.value], key)?
        } else {
            None
        };
        let (k, v) = match together {
            Some(kv) => {
                let (heads, g) = (split(&kv, config.head_dim())?, config.num_key_value_heads);
                (heads.narrow(1, 0, g)?, heads.narrow(1, g, g)?) // of (B, 2G, S, D)
            }
            None => (
                split(&self.key.forward_for_attention(key)?, config.head_dim())?,
                split(&self.value.forward_for_attention(value)?, config.value_head_dim())?,
            ),
        };
        Ok(Memory::new(self.normalise(&k, 0, transform)?.1, v))
    }

    /// Applies the projections of queries and of keys to embeddings of relative positions, for
    /// disentangled attention.
    ///
    /// # Shapes
    /// `embeddings`: `(R, E)`; returns the keys and the queries, each `(H, R, D)`
    /// # Errors
    /// [`Error::Shape`] if the width is not E; [`Error::GroupedHeads`] if there are fewer key-value
    /// heads than heads; [`Error::DisentangledNorm`] if the config has a `query_key_norm`.
    pub fn project_positions(&self, embeddings: &Tensor) -> Result<(Tensor, Tensor)> {
        let config = &self.config;
        if config.query_key_norm.is_some() {
            return Err(Error::DisentangledNorm);
        }
        if config.num_key_value_heads != config.num_attention_heads {
            let (heads, groups) = (config.num_attention_heads, config.num_key_value_heads);
            return Err(Error::GroupedHeads { heads, groups });
        }
        expect_rank("position embeddings", embeddings, 2, "(R, E)")?;
        let dims = [embeddings.dim(0)?, config.hidden_size];
        expect_dims("position embeddings", embeddings, &dims, "(R, E)")?;
        let x = embeddings.unsqueeze(0)?;
        let heads = |linear: &Linear| -> Result<Tensor> {
            let x = split(&linear.forward_for_attention(&x)?, config.head_dim())?; // (1, H, R, D)
            Ok(x.squeeze(0)?)
        };
        Ok((heads(&self.key)?, heads(&self.query)?))
    }

    /// Attends with `options`, and merges the heads.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        memory: &Memory,
        mask: &LoweredMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        if options.weights == HeadWeights::All && options.dropout.is_none() {
            let (output, weights) =
                self.attend_with_weights(q, memory, mask, options.disentangled)?;
            return Ok((output, Some(weights)));
        }
        mask.check(check_qkv(q, &memory.k, &memory.v)?)?;
        let scoring = self.scoring(q, mask, options.disentangled)?;
        let (compute_type, dropout) = (self.config.compute_type, options.dropout);
        let context =
            sdpa::attend_with_compute_type(q, memory, mask, scoring, compute_type, dropout)?; // (B, H, T, V)
        let output = self.merge(&context)?;
        let weights = match &options.weights {
            HeadWeights::None => None,
            heads => {
                let Memory { k, v, .. } = memory.gathered()?;
                Some(heads.compute(q, &k, &v, mask, scoring)?.to_dtype(output.dtype())?)
            }
        };
        Ok((output, weights))
    }

    /// [`Self::attend`] with relative positions as its only option. Also returns the weights of all
    /// heads.
    pub(crate) fn attend_with_weights(
        &self,
        q: &Tensor,
        memory: &Memory,
        mask: &LoweredMask,
        disentangled: Option<&DisentangledPositions>,
    ) -> Result<(Tensor, Tensor)> {
        mask.check(check_qkv(q, &memory.k, &memory.v)?)?;
        let scoring = self.scoring(q, mask, disentangled)?;
        let compute_type = self.config.compute_type;
        let (context, weights) = sdpa::attend_with_weights(q, memory, mask, scoring, compute_type)?;
        let output = self.merge(&context)?;
        let weights = weights.to_dtype(output.dtype())?;
        Ok((output, weights))
    }

    /// The scale of the config, with relative positions if they are given.
    ///
    /// # Errors
    /// [`Error::DisentangledNorm`] for relative positions of normalised queries and keys; the
    /// errors of [`Scoring::new`].
    fn scoring<'a>(
        &self,
        q: &Tensor,
        mask: &LoweredMask,
        disentangled: Option<&'a DisentangledPositions>,
    ) -> Result<Scoring<'a>> {
        if disentangled.is_some() && self.config.query_key_norm.is_some() {
            return Err(Error::DisentangledNorm);
        }
        Scoring::new(q, mask, self.config.scale, disentangled)
    }

    /// Concatenates the heads and projects them.
    fn merge(&self, context: &Tensor) -> Result<Tensor> {
        let heads = context.transpose(1, 2)?.flatten_from(2)?; // (B, T, H·V)
        Ok(self.output.forward(&heads)?)
    }
}

impl fmt::Display for MultiHeadAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MultiHeadAttention({})", self.config)
    }
}

/// Splits `(B, T, H·D)` into heads, `(B, H, T, D)`.
fn split(x: &Tensor, d: usize) -> Result<Tensor> {
    let (b, t, width) = x.dims3()?;
    Ok(x.reshape((b, t, width / d, d))?.transpose(1, 2)?)
}

/// The first two dimensions of `x`, which has at least two.
fn first_two_dims(x: &Tensor) -> (usize, usize) {
    (x.dims()[0], x.dims()[1])
}

/// The indices of the rows (or columns) of `heads` in a weight, `d` per head, on the device of `x`.
fn head_rows(heads: &[usize], d: usize, x: &Tensor) -> Result<Tensor> {
    let rows = heads.iter().flat_map(|head| head * d..(head + 1) * d);
    Ok(Tensor::from_iter(rows.map(|row| row as u32), x.device())?)
}
