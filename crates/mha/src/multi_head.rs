//! Multi-head attention, the one core under every kind of attention here:
//! `concat(head₁, .., head_H)·W_O`, `headᵢ = attend(Q·W_Qᵢ, K·W_Kᵢ, V·W_Vᵢ)`;
//! Vaswani et al. 2017, section 3.2.2, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear_b};

use crate::{
    AttentionConfig, AttentionMask, Result, mask::expect_dims, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};

/// Multi-head attention with its four projections.
///
/// # Examples
/// Hidden states of 100 in 5 heads; 2 sequences of 4 queries and 6 keys, of which 3 and 2 are
/// valid. What the other keys hold changes nothing:
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
/// let other = Tensor::cat(&[&key.narrow(1, 0, 3)?, &Tensor::full(1e9f32, (2, 3, 100), &Cpu)?], 1)?;
/// let same = attention.forward(&query, &other, &other, &mask)?;
/// assert_eq!((out - same)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    config: AttentionConfig,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl MultiHeadAttention {
    /// The module whose `query`, `key`, `value` and `output`, each with a `weight` `(E, E)` and,
    /// where `config.bias` says so, a `bias` `(E,)`, are in `vb`.
    ///
    /// # Errors
    /// Those of [`AttentionConfig::check`]; a tensor that `vb` lacks or has in another shape.
    pub fn new(config: &AttentionConfig, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let e = config.hidden_size;
        let projection = |name, bias| linear_b(e, e, bias, vb.pp(name));
        Ok(Self {
            config: *config,
            query: projection("query", config.bias.query)?,
            key: projection("key", config.bias.key)?,
            value: projection("value", config.bias.value)?,
            output: projection("output", config.bias.output)?,
        })
    }

    /// The sizes it was built from.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// Each query's mixture of the values of the keys that it attends to.
    ///
    /// # Shapes
    /// - `query`: `(B, T, E)`; `key`, `value`: `(B, S, E)`; returns `(B, T, E)`
    /// # Errors
    /// [`crate::Error::Shape`] naming the argument that does not fit; a mask's own errors.
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let (q, k, v) = self.project(query, key, value)?; // (B, H, T|S, D)
        let context = scaled_dot_product_attention(&q, &k, &v, mask, None)?; // (B, H, T, D)
        self.merge(&context)
    }

    /// [`Self::forward`], and the weights that each head gave to the keys.
    ///
    /// # Shapes
    /// as there, and the weights `(B, H, T, S)`: each row sums to 1, or to 0 where no key is
    /// visible.
    /// # Errors
    /// as there.
    pub fn forward_with_weights(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: &AttentionMask,
    ) -> Result<(Tensor, Tensor)> {
        let (q, k, v) = self.project(query, key, value)?;
        let (context, weights) = scaled_dot_product_attention_with_weights(&q, &k, &v, mask, None)?;
        Ok((self.merge(&context)?, weights))
    }

    /// 1. Project: q, k and v of every head, in one product each.
    fn project(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let e = self.config.hidden_size;
        let axis = |x: &Tensor, i| x.dims().get(i).copied().unwrap_or(0);
        let (b, t, s) = (axis(query, 0), axis(query, 1), axis(key, 1));
        expect_dims("query", query, &[b, t, e], "(B, T, E)")?;
        expect_dims("key", key, &[b, s, e], "(B, S, E)")?;
        expect_dims("value", value, &[b, s, e], "(B, S, E)")?;
        Ok((
            self.split(&self.query.forward(query)?)?,
            self.split(&self.key.forward(key)?)?,
            self.split(&self.value.forward(value)?)?,
        ))
    }

    /// `(B, T, E)` to `(B, H, T, D)`.
    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, _e) = x.dims3()?;
        let heads = (b, t, self.config.num_attention_heads, self.config.head_dim());
        Ok(x.reshape(heads)?.transpose(1, 2)?)
    }

    /// 3. Merge: the heads side by side, through the output projection.
    fn merge(&self, context: &Tensor) -> Result<Tensor> {
        let side_by_side = context.transpose(1, 2)?.flatten_from(2)?; // (B, T, E)
        Ok(self.output.forward(&side_by_side)?)
    }
}
