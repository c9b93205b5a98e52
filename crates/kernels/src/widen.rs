//! Conversion of f16 values to f32.

use crate::{
    isa::Isa,
    simd::{LANES, RegisterTile, SimdKernel},
};

/// Converts the bits of f16 values to f32. Runs on the calling thread.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, f32_from_f16};
///
/// let mut out = [0.0; 3];
/// f32_from_f16(Isa::get()?, &[0x3c00, 0xc100, 0x0001], &mut out);
/// assert_eq!(out, [1.0, -2.5, 2f32.powi(-24)]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the slices differ in length.
pub fn f32_from_f16(isa: Isa, values: &[u16], out: &mut [f32]) {
    assert_eq!(values.len(), out.len(), "out: expected as many values as there are f16");
    let args = Args { values, out };
    isa.run(args);
}

struct Args<'a> {
    values: &'a [u16],
    out: &'a mut [f32],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { values, out } = self;
        let whole = values.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            // SAFETY: `i + LANES` is within both slices, which have the same length.
            unsafe { V::load_f16(values.as_ptr().add(i)).store(out.as_mut_ptr().add(i)) };
        }
        let mut rest = [0; LANES];
        let n = values.len() - whole; // less than `LANES`
        rest[..n].copy_from_slice(&values[whole..]);
        // SAFETY: `rest` has `LANES` values, and `out` has room for the last `n`.
        unsafe { V::load_f16(rest.as_ptr()).store_partial(out.as_mut_ptr().add(whole), n) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_converted_alike_by_all_instruction_sets() {
        let values: Vec<u16> = (0..=u16::MAX).chain([0x3c00, 0x0001, 0xfbff]).collect();
        let mut expected = vec![0.0; values.len()];
        f32_from_f16(Isa::SCALAR, &values, &mut expected);
        assert_eq!(expected[0x3555], 0.33325195);
        for isa in Isa::available() {
            let mut out = vec![0.0; values.len()];
            f32_from_f16(isa, &values, &mut out);
            for (i, (got, expected)) in out.iter().zip(&expected).enumerate() {
                let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                assert!(same, "{isa:?}, {:x}: {got}, {expected}", values[i]);
            }
        }
    }
}
