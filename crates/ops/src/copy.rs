//! Copies of keys and values in place, for a cache and its order in beam search.

use std::ops::Range;

use candle_core::{CpuStorage, DType, InplaceOp1, InplaceOp2, Layout, Tensor};
use mha_kernels::{copy_tokens, reorder_sequences};

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

/// Reorders sequences in place: the tokens `sources[i].1` of sequence `i` of `x` become those of
/// sequence `sources[i].0` before the call. The other tokens keep their values, and so do the
/// sequences beyond the length of `sources`.
///
/// Returns false, and leaves `x` unchanged, for a tensor that is not in f32, f16 or bf16 on the CPU,
/// not contiguous, or tracked by autograd. The storage of `x` is overwritten: no other tensor may
/// read these elements later.
///
/// # Shapes
/// `x`: `(B, G, S, D)`; `sources`: at most B sequences below B with ranges within `0..S`
/// # Errors
/// [`crate::Error::Candle`] for another rank, a sequence that does not exist, or a range beyond S.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// // The second sequence becomes the first one, whose first token is the same.
/// let x = Tensor::new(&[[1f32, 2., 3.], [1., 4., 5.]], &Cpu)?.reshape((2, 1, 3, 1))?;
/// assert!(ops::reorder_in_place(&x, &[(0, 0..0), (0, 1..3)])?);
/// assert_eq!(x.reshape((2, 3))?.to_vec2::<f32>()?, [[1., 2., 3.], [1., 2., 3.]]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn reorder_in_place(x: &Tensor, sources: &[(usize, Range<usize>)]) -> Result<bool> {
    if !(is_supported(x) && x.is_contiguous()) {
        return Ok(false);
    }
    let (b, g, s, d) = x.dims4()?;
    let exists = |(from, tokens): &(usize, Range<usize>)| {
        *from < b && tokens.start <= tokens.end && tokens.end <= s
    };
    if sources.len() > b || !sources.iter().all(exists) {
        let message = format!(
            "cannot reorder {b} sequences of {s} tokens by {sources:?}: expected at most {b} \
             sequences below {b}, with ranges within 0..{s}"
        );
        return Err(candle_core::Error::Msg(message).into());
    }
    if x.elem_count() > 0 {
        let elements =
            |(from, tokens): &(usize, Range<usize>)| (*from, tokens.start * d..tokens.end * d);
        let sources = sources.iter().map(elements).collect();
        x.inplace_op1(&Reorder { blocks: [g, s * d], sources })?;
    }
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

/// The arguments of [`reorder_sequences`].
struct Reorder {
    blocks: [usize; 2],
    sources: Vec<(usize, Range<usize>)>,
}

impl InplaceOp1 for Reorder {
    fn name(&self) -> &'static str {
        "reordering of sequences"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (start, end) = layout.contiguous_offsets().expect("contiguous, as checked");
        let Self { blocks, sources } = self;
        match storage {
            CpuStorage::F32(x) => reorder_sequences(&mut x[start..end], *blocks, sources),
            CpuStorage::F16(x) => reorder_sequences(&mut x[start..end], *blocks, sources),
            CpuStorage::BF16(x) => reorder_sequences(&mut x[start..end], *blocks, sources),
            _ => candle_core::bail!("{}: expected f32, f16 or bf16", self.name()),
        }
        Ok(())
    }
}
