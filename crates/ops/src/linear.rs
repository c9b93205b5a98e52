//! Linear maps, `activation(x·Wᵀ + b)`: the choice between the backends.
//!
//! | file | weights | product |
//! |---|---|---|
//! | `pooled.rs` | any; the rows of the output are pooled | CPU kernel, or candle |
//! | `packed.rs` | packed, f32, bf16 or int8, on the CPU | CPU kernel |
//! | `plain.rs` | a candle tensor of any dtype | candle; on a GPU with a kernel for bias and activation |
//! | `bf16.rs` | a bf16 tensor on a GPU | cublasLt or candle, with inputs and outputs in f32 |

mod backend;
mod bf16;
#[cfg(feature = "cuda")]
mod cuda;
mod packed;
mod plain;
mod pooled;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::Init;
use mha_kernels::{Isa, MAX_INT8_INPUT};

use self::{
    backend::{Backend, activate},
    bf16::Bf16,
    packed::Packed,
};
use crate::{Activation, ComputeType, Error, Loaded, NotLoaded, Result, Table, Weights, cpu};

/// A linear map with or without bias.
///
/// On a CPU with AVX2 or AVX-512, or if `MHA_ISA` is set, f32 weights that autograd does not track
/// are packed for the CPU kernel when the map is created, and only the packed copy is kept.
/// [`ComputeType::Bf16`] and [`ComputeType::Int8`] round the weights and the inputs of the product,
/// on any CPU; bf16 also on a GPU. The output of both is f32.
///
/// The CPU kernel supports inputs that autograd does not track, in f32 and, for bf16 and int8 maps,
/// in bf16. For a tracked input of these dtypes, the map creates an unpacked copy of the weights in
/// f32 and keeps it. A product with this copy does not round the input.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let w = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Cpu)?;
/// let bias = Tensor::new(&[10f32, 20., 30.], &Cpu)?;
/// for compute_type in [ops::ComputeType::F32, ops::ComputeType::Bf16] {
///     let linear = ops::Linear::new(compute_type, w.clone(), Some(bias.clone()))?;
///     let y = linear.forward(&Tensor::new(&[[1f32, -1.]], &Cpu)?)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[9., 19., 29.]]);
/// }
/// # Ok::<(), ops::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Packed(Arc<Packed>),
    Plain(candle_nn::Linear),
    Bf16(Bf16),
    NotLoaded(NotLoaded),
}

/// The same map, in the dtype of its weights. The weights are not packed, so the CPU kernel is not
/// used.
impl From<candle_nn::Linear> for Linear {
    fn from(plain: candle_nn::Linear) -> Self {
        Self(Kind::Plain(plain))
    }
}

impl From<Packed> for Linear {
    fn from(packed: Packed) -> Self {
        Self(Kind::Packed(Arc::new(packed)))
    }
}

/// Whether an untracked f32 weight `(out, in)` on the CPU is packed for the CPU kernel.
fn packs(compute_type: ComputeType, out: usize, input: usize) -> bool {
    let prefers_kernel = Isa::kernels_enabled() || compute_type != ComputeType::F32;
    let fits = compute_type != ComputeType::Int8 || input <= MAX_INT8_INPUT;
    prefers_kernel && fits && out * input > 0
}

impl Linear {
    /// A linear map with these weights.
    ///
    /// # Shapes
    /// `weight`: `(out, in)`; `bias`: `(out,)`
    /// # Errors
    /// [`Error::Candle`] if the weight is not a matrix; [`Error::Shape`] if the length of the bias
    /// is not `out`, or if a weight in int8 is wider than 65,536; [`Error::ComputeType`] for bf16
    /// or int8 if the weight or the bias is not f32 or is tracked by autograd, and for int8 if they
    /// are on a GPU; [`Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new(compute_type: ComputeType, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (out, input) = weight.dims2()?;
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [out]) {
            let (expected, got) = (format!("(out,) = [{out}]"), bias.dims().to_vec());
            return Err(Error::Shape { argument: "bias", expected, got });
        }
        if compute_type == ComputeType::Int8 && input > MAX_INT8_INPUT {
            let expected = format!("(out, in), where in is at most {MAX_INT8_INPUT} for int8");
            return Err(Error::Shape { argument: "weight", expected, got: vec![out, input] });
        }
        let tensors: Vec<&Tensor> = [Some(&weight), bias.as_ref()].into_iter().flatten().collect();
        let is_untracked_f32 = |x: &&Tensor| x.dtype() == DType::F32 && !x.track_op();
        let are_untracked_f32 = tensors.iter().all(is_untracked_f32);
        if compute_type == ComputeType::Bf16 && !weight.device().is_cpu() && are_untracked_f32 {
            return Ok(Self(Kind::Bf16(Bf16::new(&weight, bias)?)));
        }
        let is_supported = cpu::are_untracked_f32(&tensors);
        if compute_type != ComputeType::F32 && !is_supported {
            let unsupported = tensors.into_iter().find(|x| !is_untracked_f32(x)).unwrap_or(&weight);
            return Err(Error::ComputeType {
                compute_type,
                dtype: unsupported.dtype(),
                device: unsupported.device().location(),
                tracked: unsupported.track_op(),
            });
        }
        if !is_supported || !packs(compute_type, out, input) {
            return Ok(candle_nn::Linear::new(weight, bias).into());
        }
        Ok(Packed::pack(compute_type, &weight, bias.as_ref())?.into())
    }

    /// Loads `weight` and, if `bias` is true, `bias` from `weights`. A weight that is packed is
    /// converted from the dtype of the checkpoint to that of the map a few rows at a time.
    ///
    /// # Errors
    /// [`Error::Candle`] if `weights` lack a tensor or have it in another shape; the errors of
    /// [`Self::new`].
    pub fn load<'a>(
        compute_type: ComputeType,
        input: usize,
        out: usize,
        bias: bool,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        weights.into().module(
            |array| Packed::from_stored(compute_type, [out, input], bias, array).map(Self::from),
            |weights| {
                let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
                let bound = 1.0 / (input as f64).sqrt();
                let uniform = Init::Uniform { lo: -bound, up: bound };
                let load_bias = || weights.get_with_hints(out, "bias", uniform);
                if weights.device().is_cpu()
                    && weights.dtype() == DType::F32
                    && packs(compute_type, out, input)
                    && let Some(weight) = weights.reader((out, input), "weight")?
                {
                    let bias = match bias.then(load_bias).transpose()?.transpose() {
                        Ok(bias) => bias,
                        Err(tensor) => return Ok(Self(Kind::NotLoaded(tensor))),
                    };
                    let bias = bias.as_ref();
                    let packed = Packed::read(compute_type, &*weight, [out, input], bias)?;
                    let unread = || NotLoaded { tensor: weights.name("weight") };
                    return Ok(packed.map_or_else(|| Self(Kind::NotLoaded(unread())), Self::from));
                }
                let weight = weights.get_with_hints((out, input), "weight", init)?;
                Self::from_loaded(compute_type, weight, bias.then(load_bias).transpose()?)
            },
            |map| map.packed().map(Packed::arrays).unwrap_or_default(),
        )
    }

    /// [`Self::new`] for tensors that may not be loaded.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn from_loaded(
        compute_type: ComputeType,
        weight: Loaded<Tensor>,
        bias: Option<Loaded<Tensor>>,
    ) -> Result<Self> {
        match (weight, bias.transpose()) {
            (Ok(weight), Ok(bias)) => Self::new(compute_type, weight, bias),
            (Err(tensor), _) | (_, Err(tensor)) => Ok(Self(Kind::NotLoaded(tensor))),
        }
    }

    /// The map with the rows of a table as weights, for hidden states of `dtype`. If the map is
    /// packed and the values of the table are in shared memory, the table is not copied.
    ///
    /// # Shapes
    /// `table`: `(out, in)`; `bias`: `(out,)`
    /// # Errors
    /// The errors of [`Self::new`].
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use ops::{ComputeType, Linear, Table};
    ///
    /// let table = Table::from(Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Cpu)?);
    /// let map = Linear::from_table(ComputeType::F32, Ok(&table), DType::F32, None)?;
    /// let y = map.forward(&Tensor::new(&[[1f32, -1.]], &Cpu)?)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[-1., -1., -1.]]);
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn from_table(
        compute_type: ComputeType,
        table: Loaded<&Table>,
        dtype: DType,
        bias: Option<Loaded<Tensor>>,
    ) -> Result<Self> {
        if let (Ok(table), None | Some(Ok(_))) = (&table, &bias) {
            let (out, input) = table.dims()?;
            let bias = bias.as_ref().and_then(|bias| bias.as_ref().ok());
            let fits = |bias: &&Tensor| bias.dims() == [out] && cpu::are_untracked_f32(&[bias]);
            if let Some(weight) = table.shared()
                && dtype == DType::F32
                && packs(compute_type, out, input)
                && bias.as_ref().is_none_or(fits)
                && let Some(packed) = Packed::read(compute_type, weight, [out, input], bias)?
            {
                return Ok(packed.into());
            }
        }
        let weight = match table {
            Ok(table) => Ok(table.tensor(dtype)?),
            Err(tensor) => Err(tensor),
        };
        Self::from_loaded(compute_type, weight, bias)
    }

    fn packed(&self) -> Option<&Arc<Packed>> {
        match &self.0 {
            Kind::Packed(packed) => Some(packed),
            Kind::Plain(_) | Kind::Bf16(_) | Kind::NotLoaded(_) => None,
        }
    }

    fn backend(&self) -> Result<&dyn Backend> {
        match &self.0 {
            Kind::Packed(packed) => Ok(&**packed),
            Kind::Plain(plain) => Ok(plain),
            Kind::Bf16(bf16) => Ok(bf16),
            Kind::NotLoaded(tensor) => Err(tensor.clone().into()),
        }
    }

    /// The weights `(out, in)`. Packed weights are unpacked; the weights of bf16 and int8 maps are
    /// the rounded values.
    ///
    /// # Errors
    /// [`Error::Candle`] if the tensor cannot be created.
    pub fn weight(&self) -> Result<Tensor> {
        self.backend()?.weight()
    }

    /// The bias `(out,)`, if the map has one.
    ///
    /// # Errors
    /// [`Error::Candle`] if the tensor cannot be created.
    pub fn bias(&self) -> Result<Option<Tensor>> {
        self.backend()?.bias()
    }

    /// `x·Wᵀ + b`.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., out)`
    /// # Errors
    /// [`Error::DType`] if the map does not support the dtype of `x`: a map in bf16 or int8
    /// supports f32 and bf16, another map the dtype of its weights; [`Error::Candle`] if `x` has
    /// another width or device; [`Error::NotLoaded`] if the weights are not loaded.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_activated(x, None)
    }

    /// `activation(x·Wᵀ + b)`. If a kernel computes the product, it applies the activation in the
    /// same pass.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., out)`
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_activated(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor> {
        if let Some(packed) = self.packed().filter(|packed| packed.supports(x)) {
            let weights = [&packed.weights];
            return packed::multiply(x, &[packed::layer(&weights, activation)], DType::F32);
        }
        let backend = self.backend()?;
        let dtype = backend.output_dtype(x.dtype()).map_err(|expected| {
            let (argument, got) = ("the input of a linear map", x.dtype());
            Error::DType { argument, expected, got }
        })?;
        let (out, input) = backend.dims()?;
        if let Some((&width, leading)) = x.dims().split_last() {
            let dims = [leading, &[out]].concat();
            if x.elem_count() == 0 {
                if width != input {
                    let got = x.dims();
                    let message =
                        format!("x has the wrong shape: expected (.., {input}), got {got:?}");
                    return Err(candle_core::Error::Msg(message).bt().into());
                }
                // If `width` is the only dim that is 0, each row is `activation(b)`.
                let y = Tensor::zeros(dims, dtype, x.device())?;
                return match backend.bias()?.filter(|_| y.elem_count() > 0) {
                    Some(bias) => activate(y.broadcast_add(&bias)?, activation),
                    None => activate(y, activation),
                };
            }
            if !(2..=4).contains(&x.rank()) {
                // Ranks that candle's map does not support.
                let rows = x.reshape(((), width))?;
                return Ok(self.forward_activated(&rows, activation)?.reshape(dims)?);
            }
        }
        // candle's map computes wrong products for a transposed batch: it uses the rows of the
        // first sequence for every sequence.
        backend.forward_activated(&x.contiguous()?, activation)
    }

    /// [`Self::forward`] with output in the dtype that the attention kernel multiplies.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., out)`
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_for_attention(&self, x: &Tensor) -> Result<Tensor> {
        match Self::forward_all_for_attention([self], x)? {
            Some(y) => Ok(y),
            None => self.forward_rounded(x, None),
        }
    }

    /// [`Self::forward_activated`]; the output of a bf16 map on a GPU stays in bf16.
    fn forward_rounded(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor> {
        match &self.0 {
            Kind::Bf16(bf16) => {
                let x = x.to_dtype(DType::BF16)?;
                Self::from(bf16.rounded.clone()).forward_activated(&x, activation)
            }
            _ => self.forward_activated(x, activation),
        }
    }

    /// `then(activation(x·Wᵀ + b))`. If both maps are packed for the same compute type, one call of
    /// the CPU kernel computes both, so that the intermediate values stay in the CPU's cache.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., out)` of `then`, whose input is this map's output
    /// # Errors
    /// The errors of [`Self::forward`].
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use ops::{Activation, ComputeType, Linear};
    ///
    /// let first = Tensor::new(&[[1f32], [-1.]], &Cpu)?; // from 1 value to 2
    /// let first = Linear::new(ComputeType::F32, first, None)?;
    /// let then = Tensor::new(&[[2f32, 3.]], &Cpu)?; // from 2 values to 1
    /// let then = Linear::new(ComputeType::F32, then, Some(Tensor::new(&[10f32], &Cpu)?))?;
    /// let x = Tensor::new(&[[4f32], [-4.]], &Cpu)?;
    /// let y = first.forward_chain(&x, Some(Activation::Relu), &then)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[18.], [22.]]); // 2·4 + 10 and 3·4 + 10
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn forward_chain(
        &self,
        x: &Tensor,
        activation: Option<Activation>,
        then: &Self,
    ) -> Result<Tensor> {
        match (&self.0, &then.0) {
            (Kind::Packed(first), Kind::Packed(second)) => {
                if let Some(y) = first.forward_chain(x, activation, None, second)? {
                    return Ok(y);
                }
            }
            (Kind::Bf16(_), Kind::Bf16(_)) => {
                return then.forward(&self.forward_rounded(x, activation)?);
            }
            _ => {}
        }
        then.forward(&self.forward_activated(x, activation)?)
    }

    /// `then(activation(self(x)) ⊙ factor(x))`, the gated feed-forward network. Packed maps of the
    /// same compute type run in one kernel call.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., out)` of `then`
    /// # Errors
    /// The errors of [`Self::forward`].
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use ops::{Activation, ComputeType, Linear};
    ///
    /// let map = |weight: f32| -> ops::Result<Linear> {
    ///     Linear::new(ComputeType::F32, Tensor::new(&[[weight]], &Cpu)?, None)
    /// };
    /// let (gate, factor, then) = (map(1.)?, map(5.)?, map(2.)?);
    /// let x = Tensor::new(&[[3f32], [-3.]], &Cpu)?;
    /// let y = gate.forward_gated(&x, Activation::Relu, &factor, &then)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[90.], [0.]]); // 2 · max(0, 3) · 5·3
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn forward_gated(
        &self,
        x: &Tensor,
        activation: Activation,
        factor: &Self,
        then: &Self,
    ) -> Result<Tensor> {
        if let (Kind::Packed(gate), Kind::Packed(factor), Kind::Packed(then)) =
            (&self.0, &factor.0, &then.0)
            && let Some(y) = gate.forward_chain(x, Some(activation), Some(factor), then)?
        {
            return Ok(y);
        }
        #[cfg(feature = "cuda")]
        {
            let code = Activation::for_kernel(Some(activation));
            let y = match (&self.0, &factor.0) {
                (Kind::Plain(gate), Kind::Plain(factor)) => cuda::gated(gate, factor, x, code)?,
                (Kind::Bf16(gate), Kind::Bf16(factor)) if gate.output_dtype(x.dtype()).is_ok() => {
                    let x = x.to_dtype(DType::BF16)?;
                    cuda::gated(&gate.rounded, &factor.rounded, &x, code)?
                }
                _ => None,
            };
            if let Some(y) = y {
                return then.forward(&y);
            }
        }
        let gate = self.forward_activated(x, Some(activation))?;
        then.forward(&(gate * factor.forward(x)?)?)
    }

    /// Joins several maps of the same input into one map with concatenated outputs, so that one
    /// product computes all of them. Returns the maps as views of the joined map, and the joined
    /// map.
    ///
    /// The joined map is `None` in three cases: the weights are on a CPU, where the kernel computes
    /// several maps in one call; autograd tracks them; or some maps have a bias and others do not.
    pub fn joined<const N: usize>(maps: [Self; N]) -> Result<([Self; N], Option<Self>)> {
        let is_bf16 = matches!(maps[0].0, Kind::Bf16(_));
        let map = |weight: Tensor, bias| {
            Ok::<_, Error>(Self(if is_bf16 {
                Kind::Bf16(Bf16::new(&weight, bias)?)
            } else {
                Kind::Plain(candle_nn::Linear::new(weight, bias))
            }))
        };
        let is_supported = |x: &Tensor| x.device().is_cuda() && !x.track_op();
        let tensors = |map: &Self| match &map.0 {
            Kind::Plain(plain) => Some((plain.weight().clone(), plain.bias().cloned())),
            Kind::Bf16(bf16) => Some((bf16.rounded.weight().clone(), bf16.bias.clone())),
            Kind::Packed(_) | Kind::NotLoaded(_) => None,
        };
        let tensors = maps.iter().map(tensors).collect::<Option<(Vec<_>, Vec<_>)>>();
        let Some((weights, biases)) = tensors else { return Ok((maps, None)) };
        let biases: Vec<Tensor> = biases.into_iter().flatten().collect();
        let have_same_parts = biases.is_empty() || biases.len() == N;
        if !have_same_parts || !weights.iter().chain(&biases).all(is_supported) {
            return Ok((maps, None));
        }
        let weight = Tensor::cat(&weights, 0)?;
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        let mut start = 0;
        let mut parts = Vec::with_capacity(N);
        for part in &weights {
            let n = part.dim(0)?;
            let bias = bias.as_ref().map(|bias| bias.narrow(0, start, n)).transpose()?;
            parts.push(map(weight.narrow(0, start, n)?, bias)?);
            start += n;
        }
        Ok((std::array::from_fn(|i| parts[i].clone()), Some(map(weight, bias)?)))
    }

    /// Several packed maps of the same input in one product, with output in the dtype that the
    /// attention kernel multiplies; `None` if a map is not packed or its kernel does not support
    /// `x`.
    ///
    /// # Shapes
    /// `x`: `(.., in)`; returns `(.., Σ out)`
    /// # Errors
    /// [`Error::Candle`] if `x` has another width; [`Error::Isa`] if `MHA_ISA` names instructions
    /// that this machine lacks.
    /// # Panics
    /// If the maps differ in the compute type or the input width.
    pub fn forward_all_for_attention<const N: usize>(
        maps: [&Self; N],
        x: &Tensor,
    ) -> Result<Option<Tensor>> {
        let weights = maps.iter().map(|map| map.packed().filter(|map| map.supports(x)));
        let Some(weights) = weights.map(|map| Some(&map?.weights)).collect::<Option<Vec<_>>>()
        else {
            return Ok(None);
        };
        let output = attention_dtype(weights[0].compute_type())?;
        packed::multiply(x, &[packed::layer(&weights, None)], output).map(Some)
    }
}

/// The dtype in which linear maps of `compute_type` return queries, keys and values for the
/// attention kernel.
///
/// # Errors
/// [`Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
pub(super) fn attention_dtype(compute_type: ComputeType) -> Result<DType> {
    Ok(match compute_type.for_attention(Isa::get()?) {
        ComputeType::Bf16 => DType::BF16,
        ComputeType::F32 | ComputeType::Int8 => DType::F32,
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;

    #[test]
    fn an_input_of_another_dtype_is_an_error_that_names_the_supported_ones() -> Result<()> {
        let weight = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
        let x = Tensor::new(&[[1f64, -1.]], &Cpu)?;
        for (compute_type, expected) in [
            (ComputeType::F32, "f32"),
            (ComputeType::Bf16, "f32 or bf16"),
            (ComputeType::Int8, "f32 or bf16"),
        ] {
            let linear = Linear::new(compute_type, weight.clone(), None)?;
            for x in [&x, &x.to_dtype(DType::F16)?, &x.narrow(0, 0, 0)?] {
                let error = linear.forward(x).unwrap_err().to_string();
                let start = "the input of a linear map has the wrong dtype: expected ";
                assert!(error.starts_with(&format!("{start}{expected}")), "{error}");
            }
        }
        Ok(())
    }

    #[test]
    fn weights_and_biases_that_do_not_fit_are_errors() -> Result<()> {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Cpu);
        for tracked in [false, true] {
            let weight = if tracked {
                Var::zeros((3, 2), DType::F32, &Cpu)?.into_inner()
            } else {
                zeros(&[3, 2])?
            };
            for bias in [zeros(&[2])?, zeros(&[1])?, zeros(&[1, 3])?] {
                let error = Linear::new(ComputeType::F32, weight.clone(), Some(bias)).unwrap_err();
                let start = "bias has the wrong shape: expected (out,) = [3], got ";
                assert!(error.to_string().starts_with(start), "{error}");
            }
        }
        let wide = zeros(&[1, MAX_INT8_INPUT + 1])?;
        let error = Linear::new(ComputeType::Int8, wide, None).unwrap_err().to_string();
        assert!(error.contains("at most 65536 for int8, got [1, 65537]"), "{error}");
        Ok(())
    }

    /// Inputs of every rank, and without elements, with the kernel (`x` is not tracked by autograd)
    /// and with candle's operations.
    #[test]
    fn every_rank_and_empty_inputs_are_accepted_on_every_path() -> Result<()> {
        let weight = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Cpu)?;
        let bias = Tensor::new(&[1f32, 1., 1.], &Cpu)?;
        for compute_type in [ComputeType::F32, ComputeType::Bf16] {
            let linear = Linear::new(compute_type, weight.clone(), Some(bias.clone()))?;
            for rank in 1..6 {
                let dims = [vec![1; rank - 1], vec![2]].concat();
                let x = Var::ones(dims.as_slice(), DType::F32, &Cpu)?;
                let expected = [vec![1; rank - 1], vec![3]].concat();
                for x in [x.as_tensor(), &x.detach()] {
                    let y = linear.forward(x)?;
                    assert_eq!(y.dims(), expected);
                    assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4., 8., 12.]);
                }
            }
            let x = Var::zeros((0, 2), DType::BF16, &Cpu)?;
            if compute_type == ComputeType::Bf16 {
                assert_eq!(linear.forward(x.as_tensor())?.dtype(), DType::F32);
            }
            for dims in [(0, 5), (1, 0)] {
                let x = Var::zeros(dims, DType::F32, &Cpu)?;
                assert!(linear.forward(x.as_tensor()).is_err(), "{dims:?}");
                assert!(linear.forward(&x.detach()).is_err(), "{dims:?}");
            }
        }
        // A map without inputs gives its bias.
        let none =
            Linear::new(ComputeType::F32, Tensor::zeros((3, 0), DType::F32, &Cpu)?, Some(bias))?;
        let x = Tensor::zeros((2, 0), DType::F32, &Cpu)?;
        assert_eq!(none.forward(&x)?.to_vec2::<f32>()?, [[1.; 3]; 2]);
        Ok(())
    }

    /// Covers the kernel, and the two paths that use candle's map: tracked weights and tracked
    /// inputs. candle's map computes wrong products for a transposed batch.
    #[test]
    fn transposed_batches_give_the_products_of_contiguous_ones() -> Result<()> {
        let wave = |n: usize| -> candle_core::Result<Tensor> {
            (Tensor::arange(0f32, n as f32, &Cpu)? * 0.7)?.sin()
        };
        let (weight, bias) = (wave(5 * 4)?.reshape((5, 4))?, wave(5)?);
        let x = wave(3 * 4 * 6)?.reshape((3, 4, 6))?.transpose(1, 2)?; // (B, T, in)
        let expected = x.contiguous()?.reshape((18, 4))?.matmul(&weight.t()?)?;
        let expected = expected.broadcast_add(&bias)?.reshape((3, 6, 5))?;
        let trained = Var::from_tensor(&weight)?.as_tensor().clone();
        let tracked = Var::from_tensor(&x.contiguous()?.transpose(1, 2)?.contiguous()?)?;
        let tracked = tracked.transpose(1, 2)?;
        for (weight, x) in [(&weight, &x), (&trained, &x), (&weight, &tracked)] {
            let linear = Linear::new(ComputeType::F32, weight.clone(), Some(bias.clone()))?;
            let is_close = (linear.forward(x)? - &expected)?.abs()?.lt(1e-6)?; // 0 for NaN
            assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
        }
        Ok(())
    }

    /// A sum of ones in bf16 stops at 256, because the next bf16 value is 258.
    #[test]
    fn the_gradient_of_a_bias_in_bf16_is_summed_in_f32() -> Result<()> {
        let weight = Tensor::ones((1, 1), DType::BF16, &Cpu)?;
        let bias = Var::from_tensor(&Tensor::zeros(1, DType::BF16, &Cpu)?)?;
        let linear = Linear::new(ComputeType::F32, weight, Some(bias.as_tensor().clone()))?;
        let y = linear.forward(&Tensor::ones((1000, 1), DType::BF16, &Cpu)?)?;
        let gradients = y.to_dtype(DType::F32)?.sum_all()?.backward()?;
        let gradient = gradients.get(&bias).expect("a gradient").to_dtype(DType::F32)?;
        assert_eq!(gradient.to_vec1::<f32>()?, [1000.]);
        Ok(())
    }

    #[test]
    fn a_broadcast_weight_is_rounded_to_the_compute_type() -> Result<()> {
        let weight = Tensor::new(&[[1.001f32]], &Cpu)?.broadcast_as((3, 4))?;
        let x = Tensor::ones((1, 4), DType::BF16, &Cpu)?;
        let y = Linear::new(ComputeType::Bf16, weight, None)?.forward(&x)?;
        assert_eq!(y.to_vec2::<f32>()?, [[4.0; 3]]); // 1.001 rounds to 1 in bf16
        Ok(())
    }

    #[test]
    fn chained_maps_may_have_different_compute_types() -> Result<()> {
        let weight = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
        let exact = Linear::new(ComputeType::F32, weight.clone(), None)?;
        let rounded = Linear::new(ComputeType::Bf16, weight, None)?;
        let x = Tensor::new(&[[1f32, -1.]], &Cpu)?;
        for (first, then) in [(&exact, &rounded), (&rounded, &exact)] {
            let y = first.forward_chain(&x, None, then)?;
            assert_eq!(y.to_vec2::<f32>()?, [[-3., -7.]]);
        }
        Ok(())
    }

    #[test]
    fn a_tracked_bias_is_an_error_in_bf16() -> Result<()> {
        let (weight, bias) = (Tensor::new(&[[1f32]], &Cpu)?, Var::new(&[1f32], &Cpu)?);
        let linear = Linear::new(ComputeType::Bf16, weight, Some(bias.as_tensor().clone()));
        assert_eq!(
            linear.unwrap_err().to_string(),
            "Bf16 products need f32 weights and biases that autograd does not track: got F32 on \
             Cpu, tracked; convert or detach the tensors, or use ComputeType::F32"
        );
        Ok(())
    }

    #[test]
    fn untracked_f32_inputs_leave_the_weights_packed() -> Result<()> {
        let weight = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
        let linear = Linear::new(ComputeType::F32, weight, None)?;
        linear.forward(&Tensor::new(&[[1f32, -1.]], &Cpu)?)?;
        if let Kind::Packed(packed) = &linear.0 {
            assert!(packed.unpacked.get().is_none());
        }
        Ok(())
    }
}
