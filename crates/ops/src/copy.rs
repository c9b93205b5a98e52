//! Copies of keys and values in place, for a cache.

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor};
use mha_kernels::copy_tokens;

use crate::{
    Result,
    cpu::{self, strided, strided_mut},
};

/// Copies `from` to `to`, which may be a part of a larger tensor.
///
/// Returns false, and leaves `to` unchanged, for tensors that are not both in f32, f16 or bf16 on the
/// CPU, have another stride than 1 along D, or are tracked by autograd. The storage of `to` is
/// overwritten: no other tensor may read these elements later.
///
/// # Shapes
/// `from`, `to`: `(B, H, T, D)`
/// # Errors
/// [`crate::Error::Candle`] if the shapes differ, or if both tensors have one storage.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
///
/// let cache = Tensor::zeros((1, 1, 3, 2), DType::F32, &Cpu)?;
/// let new = Tensor::new(&[[[[7f32, 8.]]]], &Cpu)?;
/// assert!(ops::copy_in_place(&new, &cache.narrow(2, 1, 1)?)?);
/// assert_eq!(cache.flatten_all()?.to_vec1::<f32>()?, [0., 0., 7., 8., 0., 0.]);
/// assert!(ops::copy_in_place(&cache, &cache).is_err());
/// # Ok::<(), ops::Error>(())
/// ```
pub fn copy_in_place(from: &Tensor, to: &Tensor) -> Result<bool> {
    let has_dense_rows = |x: &Tensor| x.stride().last() == Some(&1);
    if !([from, to].into_iter().all(|x| is_supported(x) && has_dense_rows(x))
        && from.dtype() == to.dtype()
        && !to.layout().has_internal_overlap())
    {
        return Ok(false);
    }
    if from.dims() != to.dims() {
        let (from, to) = (from.dims(), to.dims());
        let message = format!("cannot copy {from:?} to {to:?}: expected equal shapes");
        return Err(candle_core::Error::Msg(message).into());
    }
    if std::ptr::eq(&*from.storage_and_layout().0, &*to.storage_and_layout().0) {
        // candle would wait for the storage that it has locked itself.
        let message = "cannot copy a tensor to its own storage: expected two storages";
        return Err(candle_core::Error::Msg(message.into()).into());
    }
    to.inplace_op2(from, &CopyTokens)?;
    Ok(true)
}

fn is_supported(x: &Tensor) -> bool {
    matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) && cpu::is_untracked(x.dtype(), x)
}

struct CopyTokens;

impl InplaceOp2 for CopyTokens {
    fn name(&self) -> &'static str {
        "copy of tokens"
    }

    fn cpu_fwd(
        &self,
        to: &mut CpuStorage,
        to_layout: &Layout,
        from: &CpuStorage,
        from_layout: &Layout,
    ) -> candle_core::Result<()> {
        match (to, from) {
            (CpuStorage::F32(to), CpuStorage::F32(from)) => {
                copy_tokens(strided(from, from_layout)?, strided_mut(to, to_layout)?);
            }
            (CpuStorage::F16(to), CpuStorage::F16(from)) => {
                copy_tokens(strided(from, from_layout)?, strided_mut(to, to_layout)?);
            }
            (CpuStorage::BF16(to), CpuStorage::BF16(from)) => {
                copy_tokens(strided(from, from_layout)?, strided_mut(to, to_layout)?);
            }
            _ => candle_core::bail!("{}: expected two tensors of one dtype", self.name()),
        }
        Ok(())
    }
}
