//! Products by AMX, whose registers hold 16 rows of 16 words each.
//!
//! A tile of the product is in four of them, over two of rows and two of a panel's columns. They are
//! used through assembly, since the intrinsics are not stable.

use std::{
    arch::{asm, x86_64::__m512},
    cell::Cell,
    marker::PhantomData,
};

use super::{
    dot::{Dot, NativeBf16, NativeInt8},
    packed::{PANEL, Panel},
    quantise::Quant,
    tile::Tile,
};
use crate::isa::AMX_ROWS as ROWS;

/// Words of k that the registers take at a time.
const WORDS: usize = 16;
/// Bytes of a row of a register, and of a panel.
const OF_REGISTER: u16 = 64;
const OF_PANEL: usize = 4 * PANEL;

/// The products of `D` by AMX, and all else as in `D`.
pub(crate) struct Amx<D>(PhantomData<D>);

/// Words that AMX multiplies: bf16 as sums of the even and of the odd numbers of 16 words, and then of
/// both.
pub(crate) trait Registers: Dot<__m512> {
    /// A tile times a panel's whole columns, for so many times [`WORDS`] of k, 1 at least.
    ///
    /// # Safety
    /// AMX, configured for the height; the places that the tile tells of.
    unsafe fn multiply(height: usize, tile: &Tile, blocks: usize);
    /// Multiplies registers, four times in a step.
    ///
    /// # Safety
    /// AMX, configured.
    unsafe fn multiply_registers(steps: usize);
}

/// Asks for eight lines of the panel, those two blocks ahead, from a byte on.
macro_rules! fetch_lines {
    ($byte:literal) => {
        concat!(
            fetch_lines!(@ $byte, "0"), fetch_lines!(@ $byte, "64"),
            fetch_lines!(@ $byte, "128"), fetch_lines!(@ $byte, "192"),
            fetch_lines!(@ $byte, "256"), fetch_lines!(@ $byte, "320"),
            fetch_lines!(@ $byte, "384"), fetch_lines!(@ $byte, "448"),
        )
    };
    (@ $byte:literal, $more:literal) => {
        concat!("prefetcht0 [{panel} + 4096 + ", $byte, " + ", $more, "]\n")
    };
}

macro_rules! registers {
    ($Words:ty, $dot:literal) => {
        impl Registers for $Words {
            #[inline]
            unsafe fn multiply(height: usize, tile: &Tile, blocks: usize) {
                let Tile { a, a_row, b, c, c_row, go_on, .. } = *tile;
                let first = height - lower(height);
                // SAFETY: reads and writes are of the caller's places.
                unsafe {
                    asm!(
                        "test {go_on}, {go_on}",
                        "jnz 2f",
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "jmp 3f",
                        "2:",
                        "tileloadd tmm0, [{upper_sums} + {of_sums}]",
                        "tileloadd tmm1, [{upper_sums} + {of_sums} + 64]",
                        "tileloadd tmm2, [{lower_sums} + {of_sums}]",
                        "tileloadd tmm3, [{lower_sums} + {of_sums} + 64]",
                        "3:",
                        "tileloadd tmm6, [{panel} + {of_panel}]",
                        "tileloadd tmm4, [{upper} + {of_row}]",
                        fetch_lines!(0),
                        concat!($dot, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{panel} + {of_panel} + 64]",
                        fetch_lines!(512),
                        concat!($dot, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{lower} + {of_row}]",
                        fetch_lines!(1024),
                        concat!($dot, " tmm2, tmm5, tmm6"),
                        fetch_lines!(1536),
                        concat!($dot, " tmm3, tmm5, tmm7"),
                        "add {upper}, 64",
                        "add {lower}, 64",
                        "add {panel}, 2048",
                        "dec {blocks}",
                        "jnz 3b",
                        "tilestored [{upper_sums} + {of_sums}], tmm0",
                        "tilestored [{upper_sums} + {of_sums} + 64], tmm1",
                        "tilestored [{lower_sums} + {of_sums}], tmm2",
                        "tilestored [{lower_sums} + {of_sums} + 64], tmm3",
                        go_on = in(reg) usize::from(go_on),
                        upper = inout(reg) a => _,
                        lower = inout(reg) a.add(first * a_row) => _,
                        of_row = in(reg) 4 * a_row,
                        panel = inout(reg) b => _,
                        of_panel = in(reg) OF_PANEL,
                        blocks = inout(reg) blocks => _,
                        upper_sums = in(reg) c,
                        lower_sums = in(reg) c.add(first * c_row),
                        of_sums = in(reg) 4 * c_row,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            unsafe fn multiply_registers(steps: usize) {
                // SAFETY: nothing is read or written but registers.
                unsafe {
                    asm!(
                        "2:",
                        concat!($dot, " tmm0, tmm4, tmm6"),
                        concat!($dot, " tmm1, tmm4, tmm7"),
                        concat!($dot, " tmm2, tmm5, tmm6"),
                        concat!($dot, " tmm3, tmm5, tmm7"),
                        "dec {steps}",
                        "jnz 2b",
                        steps = inout(reg) steps => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        options(nomem, nostack),
                    );
                }
            }
        }
    };
}

registers!(NativeBf16, "tdpbf16ps");
registers!(NativeInt8, "tdpbusd");

#[allow(unsafe_op_in_unsafe_fn)] // as the words' own
impl<D: Registers> Dot<__m512> for Amx<D> {
    const ROUNDS: bool = D::ROUNDS;
    const K_BLOCK: usize = 768;
    const IN_PLACE: bool = false;

    #[inline(always)]
    unsafe fn tile(height: usize, tile: &Tile) {
        let Tile { a, a_row, b, steps, c, c_row, columns, go_on } = *tile;
        if columns < PANEL {
            // The registers' whole rows, of which the first columns are those of the tile.
            let mut sums = [[0.0; PANEL]; ROWS];
            for (i, sums) in sums.iter_mut().take(height).enumerate().filter(|_| go_on) {
                c.add(i * c_row).copy_to_nonoverlapping(sums.as_mut_ptr(), columns);
            }
            let whole = sums.as_mut_ptr().cast();
            Self::tile(height, &Tile { c: whole, c_row: PANEL, columns: PANEL, ..*tile });
            for (i, sums) in sums.iter().take(height).enumerate() {
                c.add(i * c_row).copy_from_nonoverlapping(sums.as_ptr(), columns);
            }
            return;
        }
        configure(height);
        let (blocks, rest) = (steps / WORDS, steps % WORDS);
        if blocks > 0 {
            D::multiply(height, tile, blocks);
        }
        if rest > 0 || blocks == 0 && !go_on {
            let (mut words, mut panel) = ([[0.0; WORDS]; ROWS], [[0.0; PANEL]; WORDS]);
            for (i, words) in words.iter_mut().take(height).enumerate() {
                let from = a.add(i * a_row + blocks * WORDS);
                from.copy_to_nonoverlapping(words.as_mut_ptr(), rest);
            }
            let from = b.add(blocks * WORDS * PANEL);
            from.copy_to_nonoverlapping(panel.as_mut_ptr().cast(), rest * PANEL);
            let (a, b) = (words.as_ptr().cast(), panel.as_ptr().cast());
            let go_on = go_on || blocks > 0;
            D::multiply(height, &Tile { a, a_row: WORDS, b, go_on, ..*tile }, 1);
        }
    }
    #[inline(always)]
    unsafe fn keep_busy(steps: usize) -> usize {
        configure(ROWS);
        D::multiply_registers(steps);
        4 * steps * (ROWS / 2 * WORDS * WORDS)
    }
    #[inline(always)]
    unsafe fn dot(a: __m512, b: __m512, sum: __m512) -> __m512 {
        D::dot(a, b, sum)
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, more: __m512) -> __m512 {
        D::add(sum, more)
    }
    #[inline(always)]
    unsafe fn element(sum: __m512, row: Quant, panel: &Panel, column: usize) -> __m512 {
        D::element(sum, row, panel, column)
    }
    #[inline(always)]
    unsafe fn store_bf16(x: __m512, to: *mut u16) {
        D::store_bf16(x, to)
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: __m512, high: __m512) -> __m512 {
        D::pair_bf16(low, high)
    }
}

/// Rows of the lower half of a tile; of a single one, that one again.
fn lower(height: usize) -> usize {
    (height / 2).max(1)
}

/// What the registers hold, as the processor is told.
#[repr(C, align(64))]
#[derive(Default)]
struct Layout {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

thread_local! {
    /// What the registers are configured for; 0 if for nothing.
    static HEIGHT: Cell<usize> = const { Cell::new(0) };
}

/// # Safety
/// AMX; a [`Session`] that is there until the last use of the registers.
unsafe fn configure(height: usize) {
    if HEIGHT.replace(height) == height {
        return;
    }
    let (upper, lower) = (height.div_ceil(2) as u8, lower(height) as u8);
    let mut layout = Layout { palette: 1, ..Layout::default() };
    layout.row_bytes[..8].fill(OF_REGISTER);
    layout.rows[..8].copy_from_slice(&[upper, upper, lower, lower, upper, lower, 16, 16]);
    // SAFETY: a layout of what the caller has.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const layout, options(nostack, readonly)) };
}

/// Use of the registers: when it ends, they are given back.
pub(crate) struct Session;

impl Drop for Session {
    fn drop(&mut self) {
        if HEIGHT.replace(0) != 0 {
            // SAFETY: only what has AMX is configured.
            unsafe { asm!("tilerelease", options(nomem, nostack)) };
        }
    }
}
