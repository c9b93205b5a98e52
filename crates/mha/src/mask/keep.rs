//! Boolean masks as tensors of u8: 1 = may attend.

use candle_core::{D, Device, Tensor};

use crate::{Error, Result};

/// The product of boolean masks. Without a mask every key is visible.
#[derive(Default)]
pub(super) struct Keep(Option<Tensor>);

impl Keep {
    /// Multiplies by `part`, so that the keys that `part` hides are hidden too. The shapes
    /// broadcast.
    pub(super) fn and(&mut self, part: Tensor) -> Result<()> {
        self.0 = Some(match self.0.take() {
            None => part,
            Some(keep) => keep.broadcast_mul(&part)?,
        });
        Ok(())
    }

    /// The product; `None` if [`Self::and`] was never called.
    pub(super) fn into_tensor(self) -> Option<Tensor> {
        self.0
    }
}

/// Expands lengths `(..)` to a mask `(.., S)` of u8: 1 for key `i` if `i` is below the length.
///
/// # Errors
/// [`Error::ValidLength`] for a length above `s`.
pub(super) fn keys_before(lens: &Tensor, s: usize, device: &Device) -> Result<Tensor> {
    let host = lens.flatten_all()?.to_vec1::<u32>()?;
    if let Some(index) = host.iter().position(|&len| len as usize > s) {
        return Err(Error::ValidLength { index, got: host[index] as usize, length: s });
    }
    let lens = lens.to_device(device)?.unsqueeze(D::Minus1)?;
    Ok(Tensor::arange(0, s as u32, device)?.broadcast_lt(&lens)?)
}
