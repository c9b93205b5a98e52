//! Linear maps on a CPU whose weights are packed for the CPU kernel.

use std::{
    io::{self, Write},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use mha_kernels::{Isa, LinearMap, PackedArrays, PackedLinear, Rows, SharedBytes};

use super::backend::Backend;
use crate::{
    Activation, ComputeType, PackedArray, ReadTensor, Result,
    cpu::{self, Element},
};

/// Weights packed for the CPU kernel.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) weights: PackedLinear,
    /// The map as a candle module, created for the first input that the kernel does not support.
    pub(super) unpacked: OnceLock<candle_nn::Linear>,
}

impl From<PackedLinear> for Packed {
    fn from(weights: PackedLinear) -> Self {
        Self { weights, unpacked: OnceLock::new() }
    }
}

impl Packed {
    /// Packs weights `(out, in)` and a bias `(out,)`, both in f32 on the CPU.
    pub(super) fn pack(
        compute_type: ComputeType,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let (out, input) = weight.dims2()?;
        let bias = bias.map(|bias| bias.to_vec1::<f32>()).transpose()?;
        let (isa, bias) = (Isa::get()?, bias.as_deref());
        let pack = |weight: &[f32]| PackedLinear::pack(isa, compute_type, weight, out, input, bias);
        Ok(cpu::with_slice(&weight.contiguous()?, pack)?.into())
    }

    /// [`Self::pack`] of a weight `(out, in)` that is read a few rows at a time; `None` if it
    /// cannot be read.
    pub(super) fn read(
        compute_type: ComputeType,
        weight: &dyn ReadTensor,
        [out, input]: [usize; 2],
        bias: Option<&Tensor>,
    ) -> Result<Option<Self>> {
        let bias = bias.map(|bias| bias.to_vec1::<f32>()).transpose()?;
        let (isa, bias) = (Isa::get()?, bias.as_deref());
        let is_read = AtomicBool::new(true);
        let read = |buffer: &mut Vec<u16>, row: usize, rows: &mut [f32]| {
            if !weight.read_f32(buffer, row * input, rows) {
                is_read.store(false, Ordering::Relaxed);
            }
        };
        let packed = PackedLinear::pack_with(isa, compute_type, Vec::new, read, out, input, bias);
        Ok(is_read.into_inner().then(|| packed.into()))
    }

    /// The map from its stored arrays; `None` if one is missing or does not fit.
    pub(super) fn from_stored(
        compute_type: ComputeType,
        [out, input]: [usize; 2],
        has_bias: bool,
        array: &dyn Fn(&str) -> Option<SharedBytes>,
    ) -> Option<Self> {
        let [panels, bias, scales, column_sums] = PARTS.map(|(name, _)| array(name));
        let arrays = PackedArrays { panels: panels?, bias, scales, column_sums };
        if arrays.bias.is_some() != has_bias {
            return None;
        }
        let isa = Isa::get().ok()?;
        PackedLinear::from_arrays(isa, compute_type, out, input, arrays).map(Self::from)
    }

    /// The arrays of the map by name, for [`Self::from_stored`].
    pub(super) fn arrays(self: &Arc<Self>) -> Vec<(&'static str, Arc<dyn PackedArray>)> {
        let parts = PARTS.into_iter().filter(|(_, part)| part(self.weights.arrays()).is_some());
        let array = |part| Arc::new(PackedPart { map: self.clone(), part }) as Arc<dyn PackedArray>;
        parts.map(|(name, part)| (name, array(part))).collect()
    }

    /// Whether the kernel supports `x`.
    pub(super) fn supports(&self, x: &Tensor) -> bool {
        let is_rounded = self.weights.compute_type() != ComputeType::F32;
        cpu::is_untracked(DType::F32, x) || is_rounded && cpu::is_untracked(DType::BF16, x)
    }

    /// `then(activation(self(x)) ⊙ factor(x))` in one kernel call, so that the intermediate values
    /// stay in the CPU's cache; `None` if the kernel does not support `x` or the maps do not fit.
    pub(super) fn forward_chain(
        &self,
        x: &Tensor,
        activation: Option<Activation>,
        factor: Option<&Self>,
        then: &Self,
    ) -> Result<Option<Tensor>> {
        let (first, then, factor) = (&self.weights, &then.weights, factor.map(|map| &map.weights));
        let has_same_type = |map: &PackedLinear| map.compute_type() == first.compute_type();
        let is_factor = |map: &PackedLinear| {
            has_same_type(map) && (map.out(), map.input()) == (first.out(), first.input())
        };
        let fits =
            has_same_type(then) && first.out() == then.input() && factor.is_none_or(is_factor);
        if !self.supports(x) || !fits {
            return Ok(None);
        }
        let maps = [
            LinearMap { weights: &[first], activation: Activation::for_kernel(activation), factor },
            LinearMap { weights: &[then], activation: Activation::for_kernel(None), factor: None },
        ];
        multiply(x, &maps, DType::F32).map(Some)
    }

    fn unpacked(&self) -> Result<&candle_nn::Linear> {
        if let Some(linear) = self.unpacked.get() {
            return Ok(linear);
        }
        let linear = candle_nn::Linear::new(self.weight()?, self.bias()?);
        Ok(self.unpacked.get_or_init(|| linear))
    }
}

/// An array of packed weights, if they have it.
type Part = fn(PackedArrays<&[f32]>) -> Option<&[f32]>;

/// The arrays of packed weights by name.
const PARTS: [(&str, Part); 4] = [
    ("panels", |arrays| Some(arrays.panels)),
    ("bias", |arrays| arrays.bias),
    ("scales", |arrays| arrays.scales),
    ("column_sums", |arrays| arrays.column_sums),
];

#[derive(Debug)]
struct PackedPart {
    map: Arc<Packed>,
    part: Part,
}

impl PackedPart {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice((self.part)(self.map.weights.arrays()).unwrap_or_default())
    }
}

impl PackedArray for PackedPart {
    fn size(&self) -> usize {
        self.bytes().len()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(self.bytes())
    }
}

/// The fallback for inputs that autograd tracks, with unpacked weights.
impl Backend for Packed {
    fn dims(&self) -> Result<(usize, usize)> {
        Ok((self.weights.out(), self.weights.input()))
    }

    fn weight(&self) -> Result<Tensor> {
        Ok(Tensor::from_vec(self.weights.unpack(), self.dims()?, &Device::Cpu)?)
    }

    fn bias(&self) -> Result<Option<Tensor>> {
        Ok(self.weights.bias().map(|bias| Tensor::new(bias, &Device::Cpu)).transpose()?)
    }

    fn output_dtype(&self, input: DType) -> std::result::Result<DType, &'static str> {
        match (self.weights.compute_type(), input) {
            (_, DType::F32) => Ok(DType::F32),
            (ComputeType::F32, _) => Err("f32"),
            (_, DType::BF16) => Ok(DType::F32),
            _ => Err("f32 or bf16"),
        }
    }

    fn forward_activated(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor> {
        self.unpacked()?.forward_activated(&x.to_dtype(DType::F32)?, activation)
    }
}

/// `activation(x·Wᵀ + b)` for [`multiply`].
pub(super) fn layer<'a>(
    weights: &'a [&'a PackedLinear],
    activation: Option<Activation>,
) -> LinearMap<'a> {
    LinearMap { weights, activation: Activation::for_kernel(activation), factor: None }
}

/// The result of linear maps in sequence by the CPU kernel. `output` is its dtype, f32 or bf16.
pub(super) fn multiply(x: &Tensor, maps: &[LinearMap], output: DType) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&CpuLinear { maps, output, isa: Isa::get()? })?)
}

struct CpuLinear<'a> {
    maps: &'a [LinearMap<'a>],
    output: DType,
    isa: Isa,
}

impl CustomOp1 for CpuLinear<'_> {
    fn name(&self) -> &'static str {
        "packed linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let Self { maps, output, isa } = *self;
        let mut dims = layout.dims().to_vec();
        let input = maps[0].weights[0].input();
        let Some(last) = dims.last_mut().filter(|last| **last == input) else {
            candle_core::bail!(
                "x has the wrong shape: expected (.., {input}), got {:?}",
                layout.dims()
            );
        };
        *last = maps[maps.len() - 1].weights.iter().map(|weight| weight.out()).sum();
        let rows = match x {
            CpuStorage::BF16(_) => Rows::Bf16(cpu::slice(u16::elements(x)?, layout)?),
            _ => Rows::F32(cpu::slice(f32::elements(x)?, layout)?),
        };
        let y = match output {
            DType::BF16 => u16::into_storage(mha_kernels::chain_bf16(isa, rows, maps)),
            _ => f32::into_storage(mha_kernels::chain_f32(isa, rows, maps)),
        };
        Ok((y, dims.into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;

    #[test]
    fn tracked_inputs_share_one_unpacked_copy_of_the_weights() -> Result<()> {
        let weight = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
        let packed = Packed::pack(ComputeType::F32, &weight, None)?;
        let x = Var::new(&[[1f32, -1.]], &Cpu)?;
        let y = packed.forward_activated(&x, None)?;
        assert_eq!(y.to_vec2::<f32>()?, [[-1., -1.]]);
        let id = packed.unpacked()?.weight().id();
        let y = packed.forward_activated(&x, None)?;
        assert_eq!(packed.unpacked()?.weight().id(), id);
        let gradients = y.sum_all()?.backward()?;
        assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?, [[4., 6.]]);
        Ok(())
    }
}
