//! Conversion of 16-bit floats to f32.

use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use rayon::prelude::*;

use crate::ops::zeros;

/// The f32 values of f16 values in little-endian bytes, converted in parallel into huge pages if
/// the system has them. The conversion takes much of the loading time of a checkpoint in f16.
///
/// ```
/// assert_eq!(mha::ops::f32_from_f16(&[[0x00, 0x3c], [0x00, 0xc1]]), [1.0, -2.5]);
/// ```
pub fn f32_from_f16(values: &[[u8; 2]]) -> Vec<f32> {
    widen(values, |bits, wide| bits.reinterpret_cast::<f16>().convert_to_f32_slice(wide))
}

/// The f32 values of bf16 values in little-endian bytes, as for [`f32_from_f16`].
///
/// ```
/// assert_eq!(mha::ops::f32_from_bf16(&[[0x80, 0x3f], [0x20, 0xc0]]), [1.0, -2.5]);
/// ```
pub fn f32_from_bf16(values: &[[u8; 2]]) -> Vec<f32> {
    widen(values, |bits, wide| bits.reinterpret_cast::<bf16>().convert_to_f32_slice(wide))
}

/// Calls `convert` with the bits and the destination of each chunk of values.
fn widen(values: &[[u8; 2]], convert: impl Fn(&[u16], &mut [f32]) + Sync) -> Vec<f32> {
    const CHUNK: usize = 4096;
    let mut wide = zeros::<f32>(values.len());
    let chunks = wide.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(wide, values)| {
        let bits: Vec<u16> = values.iter().map(|&value| u16::from_le_bytes(value)).collect();
        convert(&bits, wide);
    });
    wide
}
