//! AMX: the microkernel in tile registers of 16 rows × 64 bytes.
//!
//! A tile of the product takes four registers, two along m times two along n. The instructions are
//! written as inline assembly because their intrinsics are not stable.

use std::{arch::asm, cell::Cell, marker::PhantomData};

use super::{
    avx512::{Avx512, Avx512Bf16Vnni, Avx512Vector, NativeBf16, NativeInt8},
    bf16x3,
    dot::{Dot, F32},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel},
    microkernel::{MAX_NR as NR, Microkernel, RegisterTile, Tile},
};
use crate::compute_type::ComputeType;

/// [`Avx512Bf16Vnni`] plus AMX: tile products of bf16 and of 8-bit integers. Linear maps in f32 are
/// computed as BF16x3 ([`bf16x3`]), attention in f32 with AVX-512.
pub(super) struct Amx;

impl InstructionSet for Amx {
    const NAME: &'static str = "amx";
    /// f32 attention does not use AMX: it has too few products to pay for splitting its operands
    /// into BF16x3 terms.
    const WITHOUT_TILES: &'static str = Avx512Bf16Vnni::NAME;
    type Vector = Avx512Vector;
    type F32 = Tiles<F32>;
    type Bf16 = Tiles<NativeBf16>;
    type Int8 = Tiles<NativeInt8>;

    fn is_supported() -> bool {
        Avx512Bf16Vnni::is_supported() && request_amx()
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Avx512::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vnni")]
        unsafe fn run<D: AmxProduct>(kernel: impl ProductKernel) {
            let _session = AmxSession;
            // SAFETY: upheld by the caller. The intrinsics of `Tiles` need the enabled instructions
            // only; its AMX instructions are inline assembly.
            unsafe { kernel.run::<Avx512Vector, Tiles<D>>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::F32 => run::<F32>(kernel),
                ComputeType::Bf16 => run::<NativeBf16>(kernel),
                ComputeType::Int8 => run::<NativeInt8>(kernel),
            }
        }
    }
}

/// mr: two tile registers of 16 rows.
const AMX_MR: usize = 32;
/// Lanes of k that a register holds.
const LANES: usize = 16;
/// kc ([`Microkernel::KC`]), counted in values for BF16x3 and in packed lanes for bf16 and int8.
const KC: usize = 768;
/// Bytes of a register row.
const REGISTER_ROW: u16 = 64;
/// Bytes of a panel row.
const PANEL_ROW: usize = 4 * NR;

/// The microkernel of `D` on AMX. Conversions to bf16 use AVX-512 BF16; the other methods of
/// [`Dot`] are those of `D`.
pub(super) struct Tiles<D>(PhantomData<D>);

/// Operands that AMX multiplies. For bf16, AMX sums the even products of 16 lanes of k, then the
/// odd products, then adds both sums. f32 operands are split into bf16 terms ([`bf16x3`]).
pub(super) trait AmxProduct: Dot<Avx512Vector> {
    /// Whether the operands are f32, split into bf16 terms.
    const SPLITS_F32: bool;
    /// Multiplies a tile with all [`NR`] columns of a panel, for `blocks ≥ 1` blocks of k. A block
    /// is [`LANES`] lanes, or a block of [`bf16x3`].
    ///
    /// # Safety
    /// The CPU supports AMX, and the registers are configured for `mr`. The pointers of the tile
    /// are valid for its rows and columns.
    unsafe fn multiply(mr: usize, tile: &Tile, blocks: usize);
    /// Multiplies registers `4 · steps` times, without memory accesses.
    ///
    /// # Safety
    /// The CPU supports AMX, and the registers are configured.
    unsafe fn multiply_registers(steps: usize);
}

/// Defines a function `$multiply` that implements [`AmxProduct::multiply`].
///
/// - `steps`: the instructions for one block of k.
/// - `block`: the size of a block of k in bytes: in a row of `a`, and in the panel `b`.
/// - `fetch`: runs after each step and prefetches a part of the next block from `next_a` and
///   `next_b`. After `fetch`, the macro prefetches one cache line of [`Tile::prefetch`].
///
/// The prefetches pay off even if all data is in cache. While the core's other hyper-thread is
/// busy, they make the loop a third faster (measured on a Xeon with AMX), because tile loads then
/// overlap with tile products. Any 8 additional instructions per step have this effect.
macro_rules! multiply {
    (
        $multiply:ident, block: [$a_block:literal, $b_block:literal], fetch: $fetch:literal,
        steps: [$($step:expr,)*]
    ) => {
        #[inline]
        unsafe fn $multiply(mr: usize, tile: &Tile, blocks: usize) {
            const STEPS: usize = [$($step),*].len();
            let Tile { a, a_stride, b, c, c_stride, accumulate, .. } = *tile;
            let (prefetch_start, prefetch_step) = tile.prefetch_steps(STEPS * blocks, 1);
            let first_lower = mr - lower_rows(mr);
            // SAFETY: all reads and writes are within the tile, upheld by the caller.
            unsafe {
                asm!(
                    "test {next_a}, {next_a}",
                    "jnz 2f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "jmp 3f",
                    "2:",
                    "tileloadd tmm0, [{c_upper} + {c_stride}]",
                    "tileloadd tmm1, [{c_upper} + {c_stride} + 64]",
                    "tileloadd tmm2, [{c_lower} + {c_stride}]",
                    "tileloadd tmm3, [{c_lower} + {c_stride} + 64]",
                    "3:",
                    concat!("lea {next_a}, [{a_upper} + ", $a_block, "]"),
                    concat!("lea {next_b}, [{b} + ", $b_block, "]"),
                    $($step, $fetch, "prefetcht1 [{prefetch}]", "add {prefetch}, {prefetch_step}",)*
                    concat!("add {a_upper}, ", $a_block),
                    concat!("add {a_lower}, ", $a_block),
                    concat!("add {b}, ", $b_block),
                    "dec {blocks}",
                    "jnz 3b",
                    "tilestored [{c_upper} + {c_stride}], tmm0",
                    "tilestored [{c_upper} + {c_stride} + 64], tmm1",
                    "tilestored [{c_lower} + {c_stride}], tmm2",
                    "tilestored [{c_lower} + {c_stride} + 64], tmm3",
                    a_upper = inout(reg) a => _,
                    a_lower = inout(reg) a.add(first_lower * a_stride) => _,
                    a_stride = in(reg) 4 * a_stride,
                    next_a = inout(reg) usize::from(accumulate) => _, // a flag, then a's next block
                    b = inout(reg) b => _,
                    b_stride = in(reg) PANEL_ROW,
                    next_b = out(reg) _,
                    blocks = inout(reg) blocks => _,
                    c_upper = in(reg) c,
                    c_lower = in(reg) c.add(first_lower * c_stride),
                    c_stride = in(reg) 4 * c_stride,
                    prefetch = inout(reg) prefetch_start => _,
                    prefetch_step = in(reg) prefetch_step,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// [`multiply!`] for bf16 and int8.
macro_rules! multiply_lanes {
    ($multiply:ident, $dot:literal) => {
        multiply! {
            $multiply, block: [64, 2048],
            fetch: "prefetcht0 [{next_a}]
                prefetcht0 [{next_a} + {a_stride}]
                prefetcht0 [{next_a} + 2*{a_stride}]
                lea {next_a}, [{next_a} + 2*{a_stride}]
                prefetcht0 [{next_a} + {a_stride}]
                lea {next_a}, [{next_a} + 2*{a_stride}]
                prefetcht0 [{next_b}]
                prefetcht0 [{next_b} + 64]
                prefetcht0 [{next_b} + 128]
                prefetcht0 [{next_b} + 192]
                add {next_b}, 256",
            steps: [
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tileloadd tmm4, [{a_upper} + {a_stride}]",
                concat!($dot, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                concat!($dot, " tmm1, tmm4, tmm7"),
                "tileloadd tmm5, [{a_lower} + {a_stride}]",
                concat!($dot, " tmm2, tmm5, tmm6"),
                concat!($dot, " tmm3, tmm5, tmm7"),
            ]
        }
    };
}

multiply_lanes!(multiply_bf16, "tdpbf16ps");
multiply_lanes!(multiply_int8, "tdpbusd");

/// [`multiply!`] for BF16x3. `first` contains the steps before the second term of `a` is loaded:
/// the products of the first term of `a` with the panel's last term and, if there are three terms,
/// with the second. The last of these products is not in `first`: it is the first product of the
/// common steps, after the load. Loads are spread between the products, and a register is reloaded
/// soon after the last product that reads it.
macro_rules! multiply_bf16x3 {
    ($multiply:ident, b_block: $b_block:literal, first: [$($first:expr,)*]) => {
        multiply! {
            $multiply, block: [192, $b_block],
            fetch: "prefetcht0 [{next_a}]
                prefetcht0 [{next_a} + 64]
                prefetcht0 [{next_a} + 128]
                add {next_a}, {a_stride}
                prefetcht0 [{next_b}]
                prefetcht0 [{next_b} + 64]
                prefetcht0 [{next_b} + 128]
                add {next_b}, 192",
            steps: [
                $($first,)*
                "tileloadd tmm4, [{a_upper} + {a_stride} + 64]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a_lower} + {a_stride} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{a_upper} + {a_stride} + 128]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a_lower} + {a_stride} + 128]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm4, [{a_upper} + {a_stride}]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a_lower} + {a_stride}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            ]
        }
    };
}

multiply_bf16x3! {
    multiply_three_terms, b_block: 6144,
    first: [
        "tileloadd tmm6, [{b} + {b_stride} + 4096]",
        "tileloadd tmm4, [{a_upper} + {a_stride}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_stride} + 4160]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a_lower} + {a_stride}]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tileloadd tmm6, [{b} + {b_stride} + 2048]",
        "tdpbf16ps tmm3, tmm5, tmm7",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_stride} + 2112]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm1, tmm4, tmm7",
    ]
}

multiply_bf16x3! {
    multiply_two_terms, b_block: 4096,
    first: [
        "tileloadd tmm6, [{b} + {b_stride} + 2048]",
        "tileloadd tmm4, [{a_upper} + {a_stride}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_stride} + 2112]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a_lower} + {a_stride}]",
        "tdpbf16ps tmm2, tmm5, tmm6",
    ]
}

/// Implements [`AmxProduct`] for operands of type `$D`, with a function for panels of three terms
/// per value and one for panels of two.
macro_rules! amx_product {
    ($D:ty, $dot:literal, splits_f32: $splits_f32:literal, by: [$three:ident, $two:ident]) => {
        impl AmxProduct for $D {
            const SPLITS_F32: bool = $splits_f32;

            #[inline]
            unsafe fn multiply(mr: usize, tile: &Tile, blocks: usize) {
                // SAFETY: upheld by the caller.
                unsafe {
                    match tile.terms {
                        3 => $three(mr, tile, blocks),
                        _ => $two(mr, tile, blocks),
                    }
                }
            }

            unsafe fn multiply_registers(steps: usize) {
                // SAFETY: the instructions access registers only.
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

amx_product!(NativeBf16, "tdpbf16ps", splits_f32: false, by: [multiply_bf16, multiply_bf16]);
amx_product!(NativeInt8, "tdpbusd", splits_f32: false, by: [multiply_int8, multiply_int8]);
amx_product!(F32, "tdpbf16ps", splits_f32: true, by: [multiply_three_terms, multiply_two_terms]);

const _: () = assert!(KC.is_multiple_of(bf16x3::BLOCK));
const _: () = assert!(<Avx512Vector as RegisterTile>::NR == NR);

#[allow(unsafe_op_in_unsafe_fn)] // as in the implementations of `Dot`
impl<D: AmxProduct> Microkernel<Avx512Vector> for Tiles<D> {
    const MAX_MR: usize = AMX_MR;
    // A row of BF16x3 is three times as long as a row of bf16, so that a block has fewer tiles.
    const BLOCK: (usize, usize) = if D::SPLITS_F32 { (6, 24) } else { (12, 4) };
    const KC: usize = if D::SPLITS_F32 { bf16x3::lanes(KC) } else { KC };

    #[inline(always)]
    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        let Tile { a, a_stride, b, k_lanes, c, c_stride, columns, accumulate, .. } = *tile;
        if columns < NR {
            // Registers hold whole rows, so multiply into a buffer and copy the first columns.
            let mut acc = [[0.0; NR]; AMX_MR];
            for (i, acc) in acc.iter_mut().take(mr).enumerate().filter(|_| accumulate) {
                c.add(i * c_stride).copy_to_nonoverlapping(acc.as_mut_ptr(), columns);
            }
            let whole = acc.as_mut_ptr().cast();
            Self::multiply_tile(mr, &Tile { c: whole, c_stride: NR, columns: NR, ..*tile });
            for (i, acc) in acc.iter().take(mr).enumerate() {
                c.add(i * c_stride).copy_from_nonoverlapping(acc.as_ptr(), columns);
            }
            return;
        }
        configure(mr);
        let lanes_per_block = if D::SPLITS_F32 { bf16x3::lanes_per_block(3) } else { LANES };
        let (blocks, rest) = (k_lanes / lanes_per_block, k_lanes % lanes_per_block);
        if blocks > 0 {
            D::multiply(mr, tile, blocks);
        }
        if k_lanes == 0 && !accumulate {
            (0..mr).for_each(|i| c.add(i * c_stride).write_bytes(0, NR));
        }
        if rest > 0 {
            // Pad the last lanes of k to a block. BF16x3 always has whole blocks.
            let (mut a_block, mut b_block) = ([[0.0; LANES]; AMX_MR], [[0.0; NR]; LANES]);
            for (i, a_row) in a_block.iter_mut().take(mr).enumerate() {
                let from = a.add(i * a_stride + blocks * LANES);
                from.copy_to_nonoverlapping(a_row.as_mut_ptr(), rest);
            }
            let from = b.add(blocks * LANES * NR);
            from.copy_to_nonoverlapping(b_block.as_mut_ptr().cast(), rest * NR);
            let (a, b) = (a_block.as_ptr().cast(), b_block.as_ptr().cast());
            let accumulate = accumulate || blocks > 0;
            let padded = Tile { a, a_stride: LANES, b, prefetch: &[], accumulate, ..*tile };
            D::multiply(mr, &padded, 1);
        }
    }
    #[inline(always)]
    unsafe fn multiply_registers(steps: usize) -> usize {
        configure(AMX_MR);
        D::multiply_registers(steps);
        let products = 4 * steps * (AMX_MR / 2 * LANES * LANES);
        // A lane product is two bf16 products; BF16x3 computes six for each f32 product.
        if D::SPLITS_F32 { products * 2 / 6 } else { products }
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as above
impl<D: AmxProduct> Dot<Avx512Vector> for Tiles<D> {
    const IS_ROUNDED: bool = D::IS_ROUNDED;
    const IS_QUANTISED: bool = D::IS_QUANTISED;
    const IS_BF16X3: bool = D::SPLITS_F32;

    #[inline(always)]
    unsafe fn dot(a: Avx512Vector, b: Avx512Vector, acc: Avx512Vector) -> Avx512Vector {
        D::dot(a, b, acc)
    }
    #[inline(always)]
    unsafe fn add(x: Avx512Vector, y: Avx512Vector) -> Avx512Vector {
        D::add(x, y)
    }
    #[inline(always)]
    unsafe fn store_bf16(x: Avx512Vector, to: *mut u16) {
        NativeBf16::store_bf16(x, to)
    }
    #[inline(always)]
    unsafe fn pack_bf16(low: Avx512Vector, high: Avx512Vector) -> Avx512Vector {
        NativeBf16::pack_bf16(low, high)
    }
}

/// Rows of the lower registers. If mr is 1, the upper and the lower registers hold the same row.
fn lower_rows(mr: usize) -> usize {
    (mr / 2).max(1)
}

/// The operand of `ldtilecfg`: the shape of each register.
#[repr(C, align(64))]
#[derive(Default)]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

thread_local! {
    /// The mr that this thread's registers are configured for; 0 if they are not configured.
    static CONFIGURED_MR: Cell<usize> = const { Cell::new(0) };
}

/// Configures the registers for tiles of `mr` rows.
///
/// # Safety
/// The CPU supports AMX; an [`AmxSession`] lives until the last use of the registers.
unsafe fn configure(mr: usize) {
    if CONFIGURED_MR.replace(mr) == mr {
        return;
    }
    let (upper, lower) = (mr.div_ceil(2) as u8, lower_rows(mr) as u8);
    let mut config = TileConfig { palette: 1, ..TileConfig::default() };
    config.row_bytes[..8].fill(REGISTER_ROW);
    config.rows[..8].copy_from_slice(&[upper, upper, lower, lower, upper, lower, 16, 16]);
    // SAFETY: the configuration is valid, and the caller guarantees AMX.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
}

/// A scope in which the tile registers may be configured. Dropping the session releases them.
struct AmxSession;

impl Drop for AmxSession {
    fn drop(&mut self) {
        if CONFIGURED_MR.replace(0) != 0 {
            // SAFETY: registers are configured on CPUs with AMX only.
            unsafe { asm!("tilerelease", options(nomem, nostack)) };
        }
    }
}

/// Whether the CPU has AMX with bf16 and int8, and Linux lets this process use the tile registers.
///
/// Linux grants the registers on request only. After that, signal stacks must have room for them.
#[cfg(target_os = "linux")]
fn request_amx() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    #[allow(unused_unsafe)] // `__cpuid_count` is safe since Rust 1.94
    // SAFETY: every x86-64 CPU has CPUID; an unsupported leaf returns the data of another leaf.
    let features = unsafe { std::arch::x86_64::__cpuid_count(7, 0) }.edx;
    // SAFETY: this system call takes two integers and accesses no memory of the process.
    let request =
        || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    features & BF16_TILE_INT8 == BF16_TILE_INT8 && request() == 0
}

#[cfg(not(target_os = "linux"))]
fn request_amx() -> bool {
    false
}
