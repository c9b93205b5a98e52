//! Copies of the keys and values of sequences into another tensor, for beam search.

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor};
use half::{bf16, f16};
use mha_kernels::copy_blocks;

use crate::{Result, cpu};

/// Copies the first `len` tokens of sequences in place: sequence `i` of `to` becomes sequence
/// `batch[i]` of `from`. The other tokens of `to` keep their values.
///
/// Returns false, and leaves `to` unchanged, for tensors that are not in f32, f16 or bf16 on the CPU,
/// not contiguous, or tracked by autograd. The copy overwrites the storage of `to`: no other tensor
/// may read these elements later.
///
/// # Shapes
/// `from`: `(B, G, S, D)`; `batch`: B′ indices below B; `to`: `(B′, G, R, D)`
/// # Errors
/// [`crate::Error::Candle`] if the shapes or the dtypes do not fit, an index is not below B, or S or
/// R is below `len`.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
///
/// let from = Tensor::arange(0f32, 6., &Cpu)?.reshape((2, 1, 3, 1))?;
/// let to = Tensor::zeros((3, 1, 4, 1), DType::F32, &Cpu)?;
/// assert!(ops::copy_sequences(&from, &[1, 1, 0], 2, &to)?);
/// let rows = to.reshape((3, 4))?.to_vec2::<f32>()?;
/// assert_eq!(rows, [[3., 4., 0., 0.], [3., 4., 0., 0.], [0., 1., 0., 0.]]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn copy_sequences(from: &Tensor, batch: &[u32], len: usize, to: &Tensor) -> Result<bool> {
    let is_supported = |x: &Tensor| {
        matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && cpu::is_untracked(x.dtype(), x)
            && x.is_contiguous()
    };
    if !(is_supported(from) && is_supported(to)) {
        return Ok(false);
    }
    let ((b, g, s, d), (b_to, g_to, room, d_to)) = (from.dims4()?, to.dims4()?);
    let in_range = batch.iter().all(|&sequence| (sequence as usize) < b);
    if (g, d) != (g_to, d_to) || batch.len() != b_to || len > s.min(room) || !in_range {
        let (from, to) = (from.dims(), to.dims());
        let message = format!(
            "cannot copy {len} tokens of the sequences {batch:?} of {from:?} to {to:?}: expected \
             (B′, G, R, D) of B′ sequences that exist"
        );
        return Err(candle_core::Error::Msg(message).into());
    }
    if len > 0 && !batch.is_empty() && g * d > 0 {
        let heads_of = |&sequence: &u32| (sequence as usize * g)..(sequence as usize + 1) * g;
        let index = batch.iter().flat_map(heads_of).collect();
        let op = CopySequences { index, from: s * d, to: room * d, len: len * d };
        to.inplace_op2(from, &op)?;
    }
    Ok(true)
}

/// Copies of blocks; a block is a sequence and head.
struct CopySequences {
    /// The block of `from` for each block of `to`.
    index: Vec<usize>,
    /// The number of elements of a block of `from`, of a block of `to`, and of those that are copied.
    from: usize,
    to: usize,
    len: usize,
}

impl CopySequences {
    fn copy<T: Copy + Send + Sync>(&self, from: &[T], to: &mut [T]) {
        copy_blocks((from, self.from), (to, self.to), &self.index, self.len);
    }
}

impl InplaceOp2 for CopySequences {
    fn name(&self) -> &'static str {
        "copy of sequences"
    }

    fn cpu_fwd(
        &self,
        to: &mut CpuStorage,
        to_layout: &Layout,
        from: &CpuStorage,
        from_layout: &Layout,
    ) -> candle_core::Result<()> {
        let range = |layout: &Layout| {
            let (start, end) = layout.contiguous_offsets().expect("contiguous, as checked");
            start..end
        };
        let (to_range, from_range) = (range(to_layout), range(from_layout));
        match (to, from) {
            (CpuStorage::F32(to), CpuStorage::F32(from)) => {
                self.copy(&from[from_range], &mut to[to_range]);
            }
            (CpuStorage::F16(to), CpuStorage::F16(from)) => {
                self.copy::<f16>(&from[from_range], &mut to[to_range]);
            }
            (CpuStorage::BF16(to), CpuStorage::BF16(from)) => {
                self.copy::<bf16>(&from[from_range], &mut to[to_range]);
            }
            _ => candle_core::bail!("copy of sequences: expected two tensors of one dtype"),
        }
        Ok(())
    }
}
