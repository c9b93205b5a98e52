//! Conversion of 16-bit floats to f32.

use candle_core::{DType, Tensor};
use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use rayon::prelude::*;

use crate::zeros;

/// `x`, in f32 if its dtype is f16 or bf16.
///
/// # Errors
/// The error of candle if the conversion fails.
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[1.0f32, -2.5], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// assert_eq!(ops::widen(&x)?.to_vec1::<f32>()?, [1.0, -2.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn widen(x: &Tensor) -> candle_core::Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// The f32 values of f16 values in little-endian bytes, converted in parallel into huge pages if
/// the system has them. The conversion takes much of the loading time of a checkpoint in f16.
///
/// ```
/// assert_eq!(ops::f32_from_f16(&[[0x00, 0x3c], [0x00, 0xc1]]), [1.0, -2.5]);
/// ```
pub fn f32_from_f16(values: &[[u8; 2]]) -> Vec<f32> {
    convert(values, DType::F16)
}

/// The f32 values of bf16 values in little-endian bytes, as for [`f32_from_f16`].
///
/// ```
/// assert_eq!(ops::f32_from_bf16(&[[0x80, 0x3f], [0x20, 0xc0]]), [1.0, -2.5]);
/// ```
pub fn f32_from_bf16(values: &[[u8; 2]]) -> Vec<f32> {
    convert(values, DType::BF16)
}

/// Writes the f32 values of f16 or bf16 values, given as bits, to `wide`.
pub(crate) fn write_f32(dtype: DType, bits: &[u16], wide: &mut [f32]) {
    match dtype {
        DType::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(wide),
        _ => bits.reinterpret_cast::<bf16>().convert_to_f32_slice(wide),
    }
}

fn convert(values: &[[u8; 2]], dtype: DType) -> Vec<f32> {
    const CHUNK: usize = 4096;
    let mut wide = zeros::<f32>(values.len());
    let chunks = wide.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(wide, values)| {
        let bits: Vec<u16> = values.iter().map(|&value| u16::from_le_bytes(value)).collect();
        write_f32(dtype, &bits, wide);
    });
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_pattern_is_converted_as_by_half() {
        // Three more values than whole chunks.
        let values = (0..=u16::MAX).chain([0x3c00, 0x3f80, 1]).map(u16::to_le_bytes);
        let values: Vec<[u8; 2]> = values.collect();
        let (from_f16, from_bf16) = (f32_from_f16(&values), f32_from_bf16(&values));
        assert_eq!((from_f16.len(), from_bf16.len()), (values.len(), values.len()));
        let is_same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        for ((&value, got_f16), got_bf16) in values.iter().zip(from_f16).zip(from_bf16) {
            assert!(is_same(got_f16, f16::from_le_bytes(value).to_f32()), "f16 {value:x?}");
            assert!(is_same(got_bf16, bf16::from_le_bytes(value).to_f32()), "bf16 {value:x?}");
        }
    }
}
