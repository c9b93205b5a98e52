//! Transformations of projected heads of queries and keys in place: RMS normalisation of each head,
//! and rotary position embedding.

use candle_core::{CpuStorage, DType, InplaceOp1, InplaceOp3, Layout, Tensor};
use half::slice::HalfFloatSliceExt;
use mha_kernels::{Isa, Rotation, transform_heads_bf16, transform_heads_f32};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Result, RmsNorm,
    cpu::{self, Element, strided_mut},
};

/// The normalisations of the heads of queries and keys in one tensor.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// H, the number of heads of queries, which are before the heads of keys.
    pub query_heads: usize,
    /// The normalisation of queries.
    pub query: &'a RmsNorm,
    /// The normalisation of keys.
    pub key: &'a RmsNorm,
}

impl<'a> HeadNorms<'a> {
    /// The norms for the CPU kernel and heads of width `d`; `None` if the kernel does not support
    /// them: it needs untracked f32 weights on the CPU, and the same ε for queries and keys.
    fn for_cpu(&self, d: usize) -> Option<mha_kernels::HeadNorms<'a>> {
        let ((query, query_eps), (key, key_eps)) =
            (self.query.cpu_parameters()?, self.key.cpu_parameters()?);
        let fits = query_eps == key_eps && query.len() == d && key.len() == d;
        let query_heads = self.query_heads;
        fits.then_some(mha_kernels::HeadNorms { query_heads, query, key, eps: query_eps })
    }

    /// The weights of queries and keys in f32 on a GPU and ε, for the CUDA kernel and heads of width
    /// `d`; `None` if the kernel does not support them.
    #[cfg(feature = "cuda")]
    fn for_cuda(&self, d: usize) -> Option<([&'a Tensor; 2], f32)> {
        let ((query, query_eps), (key, key_eps)) =
            (self.query.cuda_parameters()?, self.key.cuda_parameters()?);
        let fits = query_eps == key_eps && query.elem_count() == d && key.elem_count() == d;
        fits.then_some(([query, key], query_eps))
    }
}

/// Normalises the heads of `x` in place with a CPU or CUDA kernel; see [`transform_heads_f32`].
/// Returns false, and leaves `x` unchanged, if no kernel supports the tensors, or if
/// [`Isa::kernels_enabled`] is false and the tensors are on the CPU. The CUDA kernel supports B = 1.
///
/// The kernel overwrites the storage of `x`: no other tensor may read these elements later.
///
/// # Shapes
/// `x`: `(B, H + G, T, D)`
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarBuilder;
/// use ops::{HeadNorms, RmsNorm};
///
/// let weight = |x: f32| -> candle_core::Result<_> {
///     let tensors = [("weight".to_string(), Tensor::new(&[x, x], &Cpu)?)].into();
///     Ok(VarBuilder::from_tensors(tensors, DType::F32, &Cpu))
/// };
/// let query = RmsNorm::new(2, 0.0, false, weight(5.)?)?;
/// let key = RmsNorm::new(2, 0.0, false, weight(10.)?)?;
/// let norms = HeadNorms { query_heads: 1, query: &query, key: &key };
/// let x = Tensor::new(&[[[[1f32, 7.]], [[7., 1.]]]], &Cpu)?; // a query and a key
/// if ops::normalise_heads_in_place(&x, norms)? {
///     // The root mean squares are 5.
///     assert_eq!(x.flatten_all()?.to_vec1::<f32>()?, [1., 7., 14., 2.]);
/// }
/// # Ok::<(), ops::Error>(())
/// ```
pub fn normalise_heads_in_place(x: &Tensor, norms: HeadNorms) -> Result<bool> {
    let transform = Transform { isa: Isa::get()?, norms: Some(norms) };
    if !transform.has_kernel(x, &[])? {
        return Ok(false);
    }
    x.inplace_op1(&transform)?;
    Ok(true)
}

/// Normalises the heads of `x` in place if `norms` is given, and rotates them, in one pass of a CPU
/// or CUDA kernel; see [`transform_heads_f32`]. Returns false, and leaves `x` unchanged, if no kernel
/// supports the tensors, or if [`Isa::kernels_enabled`] is false and the tensors are on the CPU. The
/// CUDA kernel supports B = 1.
///
/// The kernel overwrites the storage of `x`: no other tensor may read these elements later.
///
/// # Shapes
/// `x`: `(B, H + G, T, D)`; `cos`, `sin`: `(T, D/2)` or `(B, T, D/2)`, f32
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
pub fn rotate_in_place(
    x: &Tensor,
    norms: Option<HeadNorms>,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<bool> {
    let transform = Transform { isa: Isa::get()?, norms };
    let has_kernel = transform.has_kernel(x, &[cos, sin])?;
    if !has_kernel || !table_fits(cos, x)? || cos.dims() != sin.dims() {
        return Ok(false);
    }
    x.inplace_op3(&cos.contiguous()?, &sin.contiguous()?, &transform)?;
    Ok(true)
}

/// Whether the shape of a table of cosines or sines fits `x`.
///
/// # Shapes
/// `x`: `(B, H, T, D)`; a table that fits: `(T, D/2)` or `(B, T, D/2)`, with an even D
pub fn table_fits(table: &Tensor, x: &Tensor) -> Result<bool> {
    let ((b, _h, t, d), dims) = (x.dims4()?, table.dims());
    Ok(d.is_multiple_of(2) && (dims == [t, d / 2] || dims == [b, t, d / 2]))
}

struct Transform<'a> {
    isa: Isa,
    norms: Option<HeadNorms<'a>>,
}

impl Transform<'_> {
    /// Whether a kernel supports `x`, the norms, and the `tables` of cosines and sines.
    fn has_kernel(&self, x: &Tensor, tables: &[&Tensor]) -> Result<bool> {
        let (_b, _h, _t, d) = x.dims4()?;
        let has_cpu_kernel = cpu::is_untracked(x.dtype(), x)
            && matches!(x.dtype(), DType::F32 | DType::BF16)
            && cpu::prefers_kernel(tables)
            && self.norms.is_none_or(|norms| norms.for_cpu(d).is_some());
        #[cfg(feature = "cuda")]
        let has_cuda_kernel = cuda::are_on_same_gpu(&[&[x], tables].concat())
            && cuda_kernels::supports_rotary(x.dtype(), x.layout())
            && tables.iter().all(|table| table.dtype() == DType::F32)
            && self.norms.is_none_or(|norms| {
                norms.for_cuda(d).is_some_and(|([q, k], _)| cuda::are_on_same_gpu(&[x, q, k]))
            });
        #[cfg(not(feature = "cuda"))]
        let has_cuda_kernel = false;
        // Values that share memory, as in a broadcast tensor, cannot be changed in place.
        let is_dense = !x.layout().has_internal_overlap() && x.stride()[3] == 1;
        Ok((has_cpu_kernel || has_cuda_kernel) && is_dense)
    }

    fn on_cpu(
        &self,
        x: &mut CpuStorage,
        layout: &Layout,
        rotation: Option<Rotation>,
    ) -> candle_core::Result<()> {
        let (isa, d) = (self.isa, layout.dims()[3]);
        let norms = match self.norms.map(|norms| norms.for_cpu(d)) {
            None => None,
            Some(Some(norms)) => Some(norms),
            Some(None) => candle_core::bail!("norm of heads: expected weights for a CPU kernel"),
        };
        match x {
            CpuStorage::BF16(x) => {
                let x = strided_mut(x.reinterpret_cast_mut(), layout)?;
                transform_heads_bf16(isa, x, norms, rotation);
            }
            CpuStorage::F32(x) => {
                transform_heads_f32(isa, strided_mut(x, layout)?, norms, rotation)
            }
            _ => candle_core::bail!("norm and rotation of heads: expected f32 or bf16"),
        }
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl Transform<'_> {
    fn on_cuda(
        &self,
        x: &mut candle_core::CudaStorage,
        layout: &Layout,
        tables: Option<[cuda_kernels::TensorView; 2]>,
    ) -> candle_core::Result<()> {
        let d = layout.dims()[3];
        match (self.norms.map(|norms| (norms.query_heads, norms.for_cuda(d))), tables) {
            (None, Some([cos, sin])) => cuda_kernels::rotate(x, layout, cos, sin),
            (Some((query_heads, Some(([query, key], eps)))), tables) => {
                cuda::with_storage(query, |query| {
                    cuda::with_storage(key, |key| {
                        let norms = cuda_kernels::HeadNorms { query_heads, query, key, eps };
                        cuda_kernels::normalise_heads(x, layout, norms, tables)
                    })
                })
            }
            _ => candle_core::bail!("norm of heads: expected weights for a CUDA kernel"),
        }
    }
}

impl InplaceOp1 for Transform<'_> {
    fn name(&self) -> &'static str {
        "norm of heads"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.on_cpu(x, layout, None)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        self.on_cuda(x, layout, None)
    }
}

impl InplaceOp3 for Transform<'_> {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> candle_core::Result<()> {
        let cos = cpu::slice(f32::elements(cos)?, cos_layout)?;
        let sin = cpu::slice(f32::elements(sin)?, sin_layout)?;
        self.on_cpu(x, layout, Some(Rotation { cos, sin }))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &mut candle_core::CudaStorage,
        layout: &Layout,
        cos: &candle_core::CudaStorage,
        cos_layout: &Layout,
        sin: &candle_core::CudaStorage,
        sin_layout: &Layout,
    ) -> candle_core::Result<()> {
        self.on_cuda(x, layout, Some([(cos, cos_layout), (sin, sin_layout)]))
    }
}
