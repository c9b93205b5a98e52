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
    dot::{Dot, F32, NativeBf16, NativeInt8},
    packed::{PANEL, Panel},
    quantise::Quant,
    thirds,
    tile::Tile,
};
use crate::{buffers::LINE, isa::AMX_ROWS as ROWS};

/// Words of k that the registers take at a time.
const WORDS: usize = 16;
/// Words of k before the next rows.
const K_BLOCK: usize = 768;
/// Bytes of a row of a register, and of a panel.
const OF_REGISTER: u16 = 64;
const OF_PANEL: usize = 4 * PANEL;

/// The products of `D` by AMX, bf16 by the instruction for it, and all else as in `D`.
pub(crate) struct Amx<D>(PhantomData<D>);

/// Words that AMX multiplies. Of bf16 it adds the even products of 16 words, the odd ones, and both;
/// f32 is multiplied by [`thirds`].
pub(crate) trait Registers: Dot<__m512> {
    /// As [`Dot::THIRDS`].
    const OF_THIRDS: bool;
    /// A tile times a panel's whole columns, for so many blocks of k, 1 at least: [`WORDS`], or a block
    /// of thirds.
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

/// A function `$multiply`, as [`Registers::multiply`]. `lines` are what is done with a block of k, and
/// `next` the bytes from one block to the next, of a row and of the panel. `fetch`, which follows each
/// line, asks for a part of the next block from `row` and `word` on; so does what follows it, for a part
/// of [`Tile::next`]. Even with all of it at hand this is faster, by a third, while the core's other
/// thread is awake (measured on a Xeon with AMX; 8 instructions of any kind do it): tiles are then
/// loaded while others are multiplied.
macro_rules! multiply {
    (
        $multiply:ident, next: [$next_row:literal, $next_word:literal], fetch: $fetch:literal,
        lines: [$($line:expr,)*]
    ) => {
        #[inline]
        unsafe fn $multiply(height: usize, tile: &Tile, blocks: usize) {
            const LINES: usize = [$($line),*].len();
            let Tile { a, a_row, b, next, c, c_row, go_on, .. } = *tile;
            // Where nothing is asked for, what is at hand.
            let start = if next.is_empty() { b } else { next.as_ptr() };
            let first = height - lower(height);
            let of_next = size_of_val(next).div_ceil(LINES * blocks).min(4 * LINE); // leaves no line out
            // SAFETY: reads and writes are of the caller's places.
            unsafe {
                asm!(
                    "test {row}, {row}",
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
                    concat!("lea {row}, [{upper} + ", $next_row, "]"),
                    concat!("lea {word}, [{panel} + ", $next_word, "]"),
                    $($line, $fetch, "prefetcht1 [{next}]", "add {next}, {of_next}",)*
                    concat!("add {upper}, ", $next_row),
                    concat!("add {lower}, ", $next_row),
                    concat!("add {panel}, ", $next_word),
                    "dec {blocks}",
                    "jnz 3b",
                    "tilestored [{upper_sums} + {of_sums}], tmm0",
                    "tilestored [{upper_sums} + {of_sums} + 64], tmm1",
                    "tilestored [{lower_sums} + {of_sums}], tmm2",
                    "tilestored [{lower_sums} + {of_sums} + 64], tmm3",
                    upper = inout(reg) a => _,
                    lower = inout(reg) a.add(first * a_row) => _,
                    of_row = in(reg) 4 * a_row,
                    row = inout(reg) usize::from(go_on) => _, // before it is a row
                    panel = inout(reg) b => _,
                    of_panel = in(reg) OF_PANEL,
                    word = out(reg) _,
                    blocks = inout(reg) blocks => _,
                    upper_sums = in(reg) c,
                    lower_sums = in(reg) c.add(first * c_row),
                    of_sums = in(reg) 4 * c_row,
                    next = inout(reg) start => _,
                    of_next = in(reg) of_next,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Those of whole words.
macro_rules! multiply_words {
    ($multiply:ident, $dot:literal) => {
        multiply! {
            $multiply, next: [64, 2048],
            fetch: "prefetcht0 [{row}]
                prefetcht0 [{row} + {of_row}]
                prefetcht0 [{row} + 2*{of_row}]
                lea {row}, [{row} + 2*{of_row}]
                prefetcht0 [{row} + {of_row}]
                lea {row}, [{row} + 2*{of_row}]
                prefetcht0 [{word}]
                prefetcht0 [{word} + 64]
                prefetcht0 [{word} + 128]
                prefetcht0 [{word} + 192]
                add {word}, 256",
            lines: [
                "tileloadd tmm6, [{panel} + {of_panel}]",
                "tileloadd tmm4, [{upper} + {of_row}]",
                concat!($dot, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{panel} + {of_panel} + 64]",
                concat!($dot, " tmm1, tmm4, tmm7"),
                "tileloadd tmm5, [{lower} + {of_row}]",
                concat!($dot, " tmm2, tmm5, tmm6"),
                concat!($dot, " tmm3, tmm5, tmm7"),
            ]
        }
    };
}

multiply_words!(multiply_bf16, "tdpbf16ps");
multiply_words!(multiply_int8, "tdpbusd");

/// Those of thirds: after the `first` products, which are the panel's last thirds'. From each product to
/// the next one factor stays, and a register is loaded as soon as its last product is on its way.
macro_rules! multiply_thirds {
    ($multiply:ident, next_word: $next_word:literal, first: [$($first:expr,)*]) => {
        multiply! {
            $multiply, next: [192, $next_word],
            fetch: "prefetcht0 [{row}]
                prefetcht0 [{row} + 64]
                prefetcht0 [{row} + 128]
                add {row}, {of_row}
                prefetcht0 [{word}]
                prefetcht0 [{word} + 64]
                prefetcht0 [{word} + 128]
                add {word}, 192",
            lines: [
                $($first,)*
                "tileloadd tmm4, [{upper} + {of_row} + 64]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{lower} + {of_row} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm6, [{panel} + {of_panel}]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{panel} + {of_panel} + 64]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{upper} + {of_row} + 128]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{lower} + {of_row} + 128]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm4, [{upper} + {of_row}]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{lower} + {of_row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            ]
        }
    };
}

multiply_thirds! {
    multiply_all_thirds, next_word: 6144,
    first: [
        "tileloadd tmm6, [{panel} + {of_panel} + 4096]",
        "tileloadd tmm4, [{upper} + {of_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{panel} + {of_panel} + 4160]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{lower} + {of_row}]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tileloadd tmm6, [{panel} + {of_panel} + 2048]",
        "tdpbf16ps tmm3, tmm5, tmm7",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{panel} + {of_panel} + 2112]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm1, tmm4, tmm7",
    ]
}

multiply_thirds! {
    multiply_two_thirds, next_word: 4096,
    first: [
        "tileloadd tmm6, [{panel} + {of_panel} + 2048]",
        "tileloadd tmm4, [{upper} + {of_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{panel} + {of_panel} + 2112]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{lower} + {of_row}]",
        "tdpbf16ps tmm2, tmm5, tmm6",
    ]
}

/// By these functions, for panels that have each of the numbers' thirds or but two.
macro_rules! registers {
    ($Words:ty, $dot:literal, thirds: $thirds:literal, by: [$all:ident, $two:ident]) => {
        impl Registers for $Words {
            const OF_THIRDS: bool = $thirds;

            #[inline]
            unsafe fn multiply(height: usize, tile: &Tile, blocks: usize) {
                // SAFETY: the caller's.
                unsafe {
                    match tile.thirds {
                        3 => $all(height, tile, blocks),
                        _ => $two(height, tile, blocks),
                    }
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

registers!(NativeBf16, "tdpbf16ps", thirds: false, by: [multiply_bf16, multiply_bf16]);
registers!(NativeInt8, "tdpbusd", thirds: false, by: [multiply_int8, multiply_int8]);
registers!(F32, "tdpbf16ps", thirds: true, by: [multiply_all_thirds, multiply_two_thirds]);

const _: () = assert!(K_BLOCK.is_multiple_of(thirds::OF_BLOCK));

#[allow(unsafe_op_in_unsafe_fn)] // as the words' own
impl<D: Registers> Dot<__m512> for Amx<D> {
    const ROUNDS: bool = D::ROUNDS;
    const THIRDS: bool = D::OF_THIRDS;
    const K_BLOCK: usize = if D::OF_THIRDS { thirds::words(K_BLOCK) } else { K_BLOCK };
    const IN_PLACE: bool = false;

    #[inline(always)]
    unsafe fn tile(height: usize, tile: &Tile) {
        let Tile { a, a_row, b, steps, c, c_row, columns, go_on, .. } = *tile;
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
        let of_block = if D::OF_THIRDS { thirds::words_of_block(3) } else { WORDS };
        let (blocks, rest) = (steps / of_block, steps % of_block);
        if blocks > 0 {
            D::multiply(height, tile, blocks);
        }
        if steps == 0 && !go_on {
            (0..height).for_each(|i| c.add(i * c_row).write_bytes(0, PANEL));
        }
        if rest > 0 {
            let (mut words, mut panel) = ([[0.0; WORDS]; ROWS], [[0.0; PANEL]; WORDS]);
            for (i, words) in words.iter_mut().take(height).enumerate() {
                let from = a.add(i * a_row + blocks * WORDS);
                from.copy_to_nonoverlapping(words.as_mut_ptr(), rest);
            }
            let from = b.add(blocks * WORDS * PANEL);
            from.copy_to_nonoverlapping(panel.as_mut_ptr().cast(), rest * PANEL);
            let (a, b) = (words.as_ptr().cast(), panel.as_ptr().cast());
            let go_on = go_on || blocks > 0;
            D::multiply(height, &Tile { a, a_row: WORDS, b, next: &[], go_on, ..*tile }, 1);
        }
    }
    #[inline(always)]
    unsafe fn keep_busy(steps: usize) -> usize {
        configure(ROWS);
        D::multiply_registers(steps);
        let products = 4 * steps * (ROWS / 2 * WORDS * WORDS);
        if D::OF_THIRDS { products * 2 / 6 } else { products } // six products of bf16 each
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
        NativeBf16::store_bf16(x, to)
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: __m512, high: __m512) -> __m512 {
        NativeBf16::pair_bf16(low, high)
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
