//! A linear map, `x·Wᵀ + b`: packed for the CPU's kernels where it only infers, and candle's
//! otherwise.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, linear_b};
use mha_kernels::{Activation, ComputeType as Format, Isa, PackedLinear};

use crate::{Error, Result, cpu};

/// A linear map with or without bias.
///
/// On a CPU with AVX2 or AVX-512, weights of f32 that nobody trains are packed when it is made, and
/// are nowhere else in memory. A [`Format`] other than f32 rounds them, and what they are multiplied
/// with, on any CPU, and bf16 on a GPU too; input and output are f32 all the same.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let w = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Cpu)?;
/// let bias = Tensor::new(&[10f32, 20., 30.], &Cpu)?;
/// for format in [mha::Format::F32, mha::Format::Bf16] {
///     let linear = mha::Linear::new(format, w.clone(), Some(bias.clone()))?;
///     let y = linear.forward(&Tensor::new(&[[1f32, -1.]], &Cpu)?)?;
///     assert_eq!(y.to_vec2::<f32>()?, [[9., 19., 29.]]);
/// }
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Linear(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Packed(Arc<PackedLinear>),
    Plain(candle_nn::Linear),
    Bf16(Bf16),
}

/// A map in bf16, elsewhere than on a CPU, and its bias in f32.
#[derive(Clone, Debug)]
struct Bf16 {
    map: candle_nn::Linear,
    bias: Option<Tensor>,
}

impl Bf16 {
    fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        let bf16 = |x: &Tensor| x.to_dtype(DType::BF16);
        let rounded = bias.as_ref().map(bf16).transpose()?;
        Ok(Self { map: candle_nn::Linear::new(bf16(weight)?, rounded), bias })
    }

    /// To f32.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::BF16)?;
        #[cfg(feature = "cuda")]
        if let Some(y) =
            crate::cuda::linear_to(DType::F32, &x, self.map.weight(), self.bias.as_ref())?
        {
            return Ok(y);
        }
        Ok(self.map.forward(&x)?.to_dtype(DType::F32)?)
    }
}

impl Linear {
    /// # Shapes
    /// `weight`: `(out, in)`; `bias`: `(out,)`
    /// # Errors
    /// [`Error::Format`] for a format that only the CPU's kernels know, and weights that they
    /// cannot take.
    pub fn new(format: Format, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let tensors: Vec<&Tensor> = [Some(&weight), bias.as_ref()].into_iter().flatten().collect();
        let in_f32 = |x: &&Tensor| x.dtype() == DType::F32 && !x.track_op();
        if format == Format::Bf16 && !weight.device().is_cpu() && tensors.iter().all(in_f32) {
            return Ok(Self(Kind::Bf16(Bf16::new(&weight, bias)?)));
        }
        let fits = cpu::fits(&tensors);
        if format != Format::F32 && !fits {
            let (dtype, device) = (weight.dtype(), weight.device().location());
            return Err(Error::Format { format, dtype, device, trained: weight.track_op() });
        }
        // One number in many places is what stands in for a tensor: it takes no memory, and shall not.
        let fits = fits && !weight.stride().contains(&0);
        if !fits || weight.elem_count() == 0 || !(cpu::is_worth_it() || format != Format::F32) {
            return Ok(Self(Kind::Plain(candle_nn::Linear::new(weight, bias))));
        }
        let (out, input) = weight.dims2()?;
        let bias = bias.map(|bias| bias.flatten_all()?.to_vec1::<f32>()).transpose()?;
        let (isa, bias) = (Isa::get()?, bias.as_deref());
        let pack = |weight: &[f32]| PackedLinear::pack(isa, format, weight, out, input, bias);
        let packed = cpu::with_numbers(&weight.contiguous()?, pack)?;
        Ok(Self(Kind::Packed(Arc::new(packed))))
    }

    /// The map whose `weight` and, with `bias`, `bias` are in `vb`.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape; [`Self::new`]'s.
    pub fn load(
        format: Format,
        input: usize,
        out: usize,
        bias: bool,
        vb: VarBuilder,
    ) -> Result<Self> {
        let plain = linear_b(input, out, bias, vb)?;
        Self::new(format, plain.weight().clone(), plain.bias().cloned())
    }

    fn out(&self) -> Result<usize> {
        match &self.0 {
            Kind::Plain(plain) => Ok(plain.weight().dim(0)?),
            Kind::Bf16(bf16) => Ok(bf16.map.weight().dim(0)?),
            Kind::Packed(w) => Ok(w.out()),
        }
    }

    /// `(out, in)`, unpacked if need be, and then as its format rounds it.
    ///
    /// # Errors
    /// candle's.
    pub fn weight(&self) -> Result<Tensor> {
        match &self.0 {
            Kind::Plain(plain) => Ok(plain.weight().clone()),
            Kind::Bf16(bf16) => Ok(bf16.map.weight().to_dtype(DType::F32)?),
            Kind::Packed(w) => {
                Ok(Tensor::from_vec(w.unpack(), (w.out(), w.input()), &Device::Cpu)?)
            }
        }
    }

    /// `(out,)`, if there is one.
    ///
    /// # Errors
    /// candle's.
    pub fn bias(&self) -> Result<Option<Tensor>> {
        match &self.0 {
            Kind::Plain(plain) => Ok(plain.bias().cloned()),
            Kind::Bf16(bf16) => Ok(bf16.bias.clone()),
            Kind::Packed(w) => {
                Ok(w.bias().map(|bias| Tensor::new(bias, &Device::Cpu)).transpose()?)
            }
        }
    }

    /// `x` `(.., in)` to `(.., out)`.
    ///
    /// # Errors
    /// candle's, if `x` is of another width, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_then(x, Activation::None, |y| Ok(y.clone()))
    }

    /// [`Self::forward`], then an activation: fused into the kernel, or else as `activate` does it.
    ///
    /// # Errors
    /// as there.
    pub fn forward_then(
        &self,
        x: &Tensor,
        fused: Activation,
        activate: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(y) = Self::packed([self], x, fused, false)? {
            return Ok(y);
        }
        if x.elem_count() == 0 && x.rank() > 0 {
            let mut dims = x.dims().to_vec();
            dims[x.rank() - 1] = self.out()?;
            return Ok(Tensor::zeros(dims, x.dtype(), x.device())?);
        }
        match &self.0 {
            Kind::Plain(plain) => {
                #[cfg(feature = "cuda")]
                if let Some(y) = crate::cuda::linear(plain, x, fused)? {
                    return Ok(y);
                }
                Ok(activate(&plain.forward(x)?)?)
            }
            Kind::Bf16(bf16) => Ok(activate(&bf16.forward(x)?)?),
            Kind::Packed(w) => {
                let plain = candle_nn::Linear::new(self.weight()?, self.bias()?);
                let x = match x.dtype() {
                    DType::BF16 if w.compute_type() != Format::F32 => x.to_dtype(DType::F32)?,
                    _ => x.clone(),
                };
                Ok(activate(&plain.forward(&x)?)?)
            }
        }
    }

    /// [`Self::forward`] to what stays within a module: of bf16, if that is what it multiplies.
    pub(crate) fn forward_inside(&self, x: &Tensor) -> Result<Tensor> {
        match Self::forward_all_inside([self], x)? {
            Some(y) => Ok(y),
            None => self.forward_then_inside(x, Activation::None, |y| Ok(y.clone())),
        }
    }

    fn forward_then_inside(
        &self,
        x: &Tensor,
        fused: Activation,
        activate: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        match &self.0 {
            Kind::Bf16(bf16) => {
                let x = x.to_dtype(DType::BF16)?;
                Self(Kind::Plain(bf16.map.clone())).forward_then(&x, fused, activate)
            }
            Kind::Plain(_) | Kind::Packed(_) => self.forward_then(x, fused, activate),
        }
    }

    /// `then` of [`Self::forward_then`], as one kernel if both are packed.
    ///
    /// # Errors
    /// as there.
    pub fn forward_chain(
        &self,
        x: &Tensor,
        fused: Activation,
        activate: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
        then: &Self,
    ) -> Result<Tensor> {
        match (&self.0, &then.0) {
            (Kind::Packed(first), Kind::Packed(second))
                if cpu::takes_input(first.compute_type(), x) && first.out() == second.input() =>
            {
                let maps = [(first, fused), (second, Activation::None)];
                cpu::linear(x, maps.map(|(w, then)| (vec![w.clone()], then)).into(), DType::F32)
            }
            (Kind::Bf16(_), Kind::Bf16(_)) => {
                then.forward(&self.forward_then_inside(x, fused, activate)?)
            }
            _ => then.forward(&self.forward_then(x, fused, activate)?),
        }
    }

    /// Several maps as one, side by side, and they themselves as parts of it: on a GPU, where nobody
    /// trains them, so that one product does the work of all.
    pub(crate) fn joined<const N: usize>(maps: [Self; N]) -> Result<([Self; N], Option<Self>)> {
        let in_bf16 = matches!(maps[0].0, Kind::Bf16(_));
        let map = |weight: Tensor, bias| {
            Ok::<_, Error>(Self(match in_bf16 {
                true => Kind::Bf16(Bf16::new(&weight, Some(bias))?),
                false => Kind::Plain(candle_nn::Linear::new(weight, Some(bias))),
            }))
        };
        let fits = |x: &Tensor| x.device().is_cuda() && !x.track_op();
        let tensors = |map: &Self| match &map.0 {
            Kind::Plain(plain) => Some((plain.weight().clone(), plain.bias()?.clone())),
            Kind::Bf16(bf16) => Some((bf16.map.weight().clone(), bf16.bias.clone()?)),
            Kind::Packed(_) => None,
        };
        let tensors = maps.iter().map(tensors).collect::<Option<(Vec<_>, Vec<_>)>>();
        let Some((weights, biases)) =
            tensors.filter(|(weights, biases)| weights.iter().chain(biases).all(fits))
        else {
            return Ok((maps, None));
        };
        let (weight, bias) = (Tensor::cat(&weights, 0)?, Tensor::cat(&biases, 0)?);
        let mut start = 0;
        let mut parts = Vec::with_capacity(N);
        for own in &weights {
            let n = own.dim(0)?;
            parts.push(map(weight.narrow(0, start, n)?, bias.narrow(0, start, n)?)?);
            start += n;
        }
        Ok((std::array::from_fn(|i| parts[i].clone()), Some(map(weight, bias)?)))
    }

    /// Several maps of the same `x`, side by side in one product, `(.., in)` to `(.., Σ out)`, if they
    /// are all packed: to what stays within a module.
    pub(crate) fn forward_all_inside<const N: usize>(
        maps: [&Self; N],
        x: &Tensor,
    ) -> Result<Option<Tensor>> {
        Self::packed(maps, x, Activation::None, true)
    }

    fn packed<const N: usize>(
        maps: [&Self; N],
        x: &Tensor,
        fused: Activation,
        inside: bool,
    ) -> Result<Option<Tensor>> {
        let mut weights = Vec::with_capacity(N);
        for map in maps {
            match &map.0 {
                Kind::Packed(w) if cpu::takes_input(w.compute_type(), x) => weights.push(w.clone()),
                _ => return Ok(None),
            }
        }
        let to = if inside { cpu::dtype_inside(weights[0].compute_type())? } else { DType::F32 };
        cpu::linear(x, vec![(weights, fused)], to).map(Some)
    }
}
