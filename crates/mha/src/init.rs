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

/// The distribution of initial weights. Biases are 0; weights of layer normalisation are 1.
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
    /// `key` and `value` are uniform in ±`√(6 / (in + out))`.
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
    /// The values of a variable depend on its name, its shape and the seed only: neither on the
    /// order of the lookups nor on the device.
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

    fn values(self, name: &str, dims: &[usize], rng: ChaCha8Rng) -> Option<Vec<f32>> {
        let count = dims.iter().product();
        let (module, parameter) = name.rsplit_once('.').unwrap_or(("", name));
        let &[out, input] = dims else {
            let value = if parameter == "weight" { 1.0 } else { 0.0 };
            return Some(vec![value; count]);
        };
        if count == 0 {
            return Some(vec![]);
        }
        if let Self::Bert { initializer_range } = self {
            let valid = (initializer_range >= 0.0).then_some(initializer_range as f32)?;
            let normal = Normal::new(0.0, valid).ok()?;
            return Some(normal.sample_iter(rng).take(count).collect());
        }
        let (out, input) = (out as f32, input as f32);
        let bound = match module.rsplit('.').next() {
            Some("query" | "key" | "value") if self == Self::Xavier => {
                (6.0 / (input + 3.0 * out)).sqrt()
            }
            Some("query" | "key" | "value") => (6.0 / (input + out)).sqrt(),
            _ => 1.0 / input.sqrt(),
        };
        Some(Uniform::new_inclusive(-bound, bound).ok()?.sample_iter(rng).take(count).collect())
    }
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
        _init: candle_nn::Init,
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
        let Some(values) = self.init.values(name, shape.dims(), rng) else {
            candle_core::bail!("{:?} is invalid: expected a finite f32 of at least 0", self.init);
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
