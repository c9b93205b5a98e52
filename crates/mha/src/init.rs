//! Initial weights for training, drawn from a seed.

use std::{
    collections::HashMap,
    sync::{MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{VarBuilder, VarMap, var_builder::SimpleBackend};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};

/// The distribution of initial weights. Biases are 0; weights of normalisations have the value that
/// the normalisation asks for: 1, or 0 with a unit offset.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu};
/// use candle_nn::VarMap;
/// use mha::{AttentionConfig, Init, MultiHeadAttention};
///
/// let vars = VarMap::new();
/// let vb = Init::Xavier.var_builder(&vars, 42, DType::F32, &Cpu);
/// let attention = MultiHeadAttention::new(&AttentionConfig::new(64, 4), vb)?;
/// let query = attention.tensors()?["query.weight"].abs()?.max_all()?.to_scalar::<f32>()?;
/// let bound = (6f32 / (64. + 3. * 64.)).sqrt(); // PyTorch stacks q, k and v in one matrix
/// assert!(query <= bound && query > 0.99 * bound);
/// assert_eq!(vars.all_vars().len(), 8);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// As `torch.nn.MultiheadAttention`: `query`, `key` and `value` are uniform in
    /// ±`√(6 / (in + 3·out))`, since PyTorch stacks them in one matrix; other weights are uniform
    /// in ±`1/√in`.
    ///
    /// # Source
    /// Glorot and Bengio 2010, <https://proceedings.mlr.press/v9/glorot10a.html>.
    Xavier,
    /// As `torch.nn.MultiheadAttention` with `kdim` or `vdim`, which has three matrices: `query`,
    /// `key` and `value` are uniform in ±`√(6 / (in + out))`; other weights are as in
    /// [`Self::Xavier`].
    XavierSeparate,
    /// As BERT in transformers: all weights are normal with mean 0. BERT's original code truncates
    /// the distribution at two standard deviations.
    Bert {
        /// The standard deviation, 0.02 in the published configs.
        initializer_range: f64,
    },
}

impl Init {
    /// A builder that creates each variable on its first lookup and stores it in `vars`.
    ///
    /// Variables of rank 2 are random as the variant describes. In rank 1, a `bias` is 0. Other
    /// variables, such as the `weight` of a normalisation, have the values that the hint of the
    /// lookup describes.
    ///
    /// The values of a variable depend on its name, its shape, the hint and the seed only: neither on
    /// the order of the lookups nor on the device.
    ///
    /// # Errors
    /// The lookup of a variable returns an error for an `initializer_range` that is negative or not
    /// finite, for a hint with invalid bounds or an invalid standard deviation, and if a variable
    /// of the same name exists with another shape.
    pub fn var_builder(
        self,
        vars: &VarMap,
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> VarBuilder<'static> {
        let backend = Seeded { vars: vars.clone(), init: self, seed };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }

    /// The values of a variable. `None` for an invalid `initializer_range` or hint.
    fn values(
        self,
        name: &str,
        shape: &Shape,
        hint: candle_nn::Init,
        rng: ChaCha8Rng,
    ) -> Option<Vec<f32>> {
        let count = shape.elem_count();
        if count == 0 {
            return Some(vec![]);
        }
        let (module, parameter) = name.rsplit_once('.').unwrap_or(("", name));
        let (out, input) = match (shape.dims(), parameter) {
            (&[out, input], _) => (out, input),
            ([_], "bias") => return Some(vec![0.0; count]),
            _ => return by_hint(hint, shape, rng),
        };
        if let Self::Bert { initializer_range } = self {
            let valid = (initializer_range >= 0.0).then_some(initializer_range)?;
            return normal(0.0, valid, count, rng);
        }
        let (out, input) = (out as f32, input as f32);
        let bound = match module.rsplit('.').next() {
            Some("query" | "key" | "value") if self == Self::Xavier => {
                (6.0 / (input + 3.0 * out)).sqrt()
            }
            Some("query" | "key" | "value") => (6.0 / (input + out)).sqrt(),
            _ => 1.0 / input.sqrt(),
        };
        uniform(-bound, bound, count, rng)
    }
}

/// The values that the hint of a lookup describes.
fn by_hint(hint: candle_nn::Init, shape: &Shape, rng: ChaCha8Rng) -> Option<Vec<f32>> {
    use candle_nn::init::NormalOrUniform;

    let count = shape.elem_count();
    match hint {
        candle_nn::Init::Const(value) => Some(vec![value as f32; count]),
        candle_nn::Init::Randn { mean, stdev } => normal(mean, stdev, count, rng),
        candle_nn::Init::Uniform { lo, up } => uniform(lo as f32, up as f32, count, rng),
        candle_nn::Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => normal(0.0, stdev, count, rng),
                NormalOrUniform::Uniform => {
                    let bound = (3f64.sqrt() * stdev) as f32;
                    uniform(-bound, bound, count, rng)
                }
            }
        }
    }
}

fn normal(mean: f64, stdev: f64, count: usize, rng: ChaCha8Rng) -> Option<Vec<f32>> {
    let normal = Normal::new(mean as f32, stdev as f32).ok()?;
    Some(normal.sample_iter(rng).take(count).collect())
}

fn uniform(low: f32, high: f32, count: usize, rng: ChaCha8Rng) -> Option<Vec<f32>> {
    Some(Uniform::new_inclusive(low, high).ok()?.sample_iter(rng).take(count).collect())
}

struct Seeded {
    vars: VarMap,
    init: Init,
    seed: u64,
}

impl Seeded {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Var>> {
        self.vars.data().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        hint: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut vars = self.lock();
        if let Some(var) = vars.get(name) {
            if var.shape() != &shape {
                candle_core::bail!("{name} has shape {:?}: expected {shape:?}", var.shape());
            }
            return Ok(var.as_tensor().clone());
        }
        let rng = ChaCha8Rng::seed_from_u64(fnv_1a(name) ^ self.seed);
        let Some(values) = self.init.values(name, &shape, hint, rng) else {
            candle_core::bail!(
                "{name}: {:?} or {hint:?} is invalid: expected values that are finite in \
                 f32, and a standard deviation of at least 0",
                self.init
            );
        };
        let var = Var::from_tensor(&Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?)?;
        vars.insert(name.to_string(), var.clone());
        Ok(var.as_tensor().clone())
    }

    fn get_unchecked(
        &self,
        name: &str,
        _dtype: DType,
        _device: &Device,
    ) -> candle_core::Result<Tensor> {
        match self.lock().get(name).cloned() {
            Some(var) => Ok(var.as_tensor().clone()),
            None => candle_core::bail!("{name} does not exist: expected a name in the VarMap"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// The FNV-1a hash. Unlike the hash of the standard library, it is the same in every release, so
/// that a name always gets the same values.
fn fnv_1a(name: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, IndexOp};
    use candle_nn::init::DEFAULT_KAIMING_UNIFORM;

    use super::*;

    #[test]
    fn variables_of_other_ranks_or_names_have_the_values_of_their_hints() -> candle_core::Result<()>
    {
        let vb = Init::Xavier.var_builder(&VarMap::new(), 1, DType::F32, &Cpu);
        let variance = vb.get_with_hints(3, "norm.running_var", candle_nn::Init::Const(1.))?;
        assert_eq!(variance.to_vec1::<f32>()?, [1., 1., 1.]);
        let weight = vb.get_with_hints(3, "norm.weight", candle_nn::Init::Const(1.))?;
        assert_eq!(weight.to_vec1::<f32>()?, [1., 1., 1.]);
        let of_unit_offset = ops::RmsNorm::new(3, 1e-6, true, vb.pp("unit_offset_norm"))?;
        assert_eq!(of_unit_offset.weight().to_vec1::<f32>()?, [0., 0., 0.]);

        // A convolution of 4 filters with a fan of 2·3·3 = 18; the bound of the values is √(6 / fan).
        let filters = vb.get_with_hints((4, 2, 3, 3), "conv.weight", DEFAULT_KAIMING_UNIFORM)?;
        let values = filters.flatten_all()?.to_vec1::<f32>()?;
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let bound = (6f32 / 18.).sqrt();
        assert!(largest <= bound && largest > 0.9 * bound, "{largest}");
        assert_ne!(filters.i(0)?.flatten_all()?.to_vec1::<f32>()?, values[18..36]);
        let again = Init::Xavier.var_builder(&VarMap::new(), 1, DType::F32, &Cpu);
        let again = again.get_with_hints((4, 2, 3, 3), "conv.weight", DEFAULT_KAIMING_UNIFORM)?;
        assert_eq!(again.flatten_all()?.to_vec1::<f32>()?, values);
        Ok(())
    }
}
