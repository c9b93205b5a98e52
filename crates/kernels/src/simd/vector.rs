//! [`Vector`]: 16 lanes, the operations that kernels are written with. [`Register`]: the same
//! operations on one register of an instruction set.

/// Lanes of a [`Vector`].
pub(crate) const LANES: usize = 16;

/// A register of [`Self::LANES`] lanes of 32 bits. A lane holds an f32 unless stated otherwise.
///
/// # Safety
/// All methods require that the CPU supports the instructions of the implementing type, which an
/// [`Isa`](crate::Isa) proves. Methods that take a pointer access as many elements as they state,
/// at any alignment.
pub(crate) trait Register: Copy + Send + Sync {
    /// A power of two, at most [`LANES`].
    const LANES: usize;
    /// Whether [`Self::dot_int8`] adds adjacent products in 16 bits, so that the sum of two
    /// adjacent weights must be within ±127.
    const ADDS_INT8_PAIRS_IN_I16: bool = false;

    unsafe fn splat(x: f32) -> Self;
    /// Reads `LANES` values.
    unsafe fn load(from: *const f32) -> Self;
    /// Reads `n < LANES` values; the other lanes are 0.
    unsafe fn load_partial(from: *const f32, n: usize) -> Self;
    /// Writes `LANES` values.
    unsafe fn store(self, to: *mut f32);
    /// Writes the first `n < LANES` values.
    unsafe fn store_partial(self, to: *mut f32, n: usize);
    /// `self · y + z`, rounded once.
    unsafe fn fma(self, y: Self, z: Self) -> Self;
    unsafe fn add(self, y: Self) -> Self;
    unsafe fn sub(self, y: Self) -> Self;
    unsafe fn mul(self, y: Self) -> Self;
    unsafe fn div(self, y: Self) -> Self;
    /// The maximum of each lane; `y` if either operand is NaN.
    unsafe fn max(self, y: Self) -> Self;
    /// The minimum of each lane; `y` if either operand is NaN.
    unsafe fn min(self, y: Self) -> Self;
    /// The nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// `2ⁿ` for n = `self`, an integer in −126..=127; 0 for −127.
    unsafe fn exp2_int(self) -> Self;
    /// `self · 2ⁿ`, where the lanes of n are integers and those of `self` are near 1. A subnormal
    /// result is rounded once.
    #[inline(always)]
    unsafe fn mul_exp2(self, n: Self) -> Self {
        // SAFETY: upheld by the caller.
        unsafe {
            let n = n.max(Self::splat(-252.0)).min(Self::splat(254.0));
            let half = n.mul(Self::splat(0.5)).round();
            self.mul(half.exp2_int()).mul(n.sub(half).exp2_int())
        }
    }
    /// `yes` in the lanes in which `self` is below 0, `no` in the others.
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self;
    /// The sum of all lanes: the upper half of the lanes is added to the lower half until one lane
    /// is left.
    unsafe fn reduce_add(self) -> f32;
    /// The maximum of all lanes.
    unsafe fn reduce_max(self) -> f32;

    /// One stage of a transpose: for every lane `i` with `i & distance == 0`, swaps lane
    /// `i + distance` of `self` with lane `i` of `y`. `distance` is a power of two below `LANES`.
    unsafe fn exchange(self, y: Self, distance: usize) -> (Self, Self);
    /// Swaps each lane `i` with lane `i ^ distance`. `distance` is a power of two below `LANES`.
    unsafe fn swap_lanes(self, distance: usize) -> Self;

    // Other element types.

    /// Reads `LANES` values of f16.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Reads `LANES` values of bf16.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Writes `LANES` values, rounded to bf16.
    unsafe fn store_bf16(self, to: *mut u16);
    /// Packs pairs of values, rounded to bf16: `self` into the lower half of each lane, `high` into
    /// the upper half.
    unsafe fn pack_bf16(self, high: Self) -> Self;
    /// Writes `LANES` bytes, rounded to the nearest integer and clamped to 0..=255. NaN and values
    /// from 2³¹ on give unspecified bytes.
    unsafe fn store_u8(self, to: *mut u8);
    /// Packs the upper halves of the lanes: those of `self` into the lower half, those of `high`
    /// into the upper half.
    unsafe fn pack_high_halves(self, high: Self) -> Self;
    /// Widens the bf16 in the lower half of each lane.
    unsafe fn even_bf16(self) -> Self;
    /// Widens the bf16 in the upper half of each lane.
    unsafe fn odd_bf16(self) -> Self;
    /// `sum + Σ aᵢ·bᵢ` in i32 over the four bytes of each lane: `a` is `self`, unsigned; `b` is
    /// signed. With [`Self::ADDS_INT8_PAIRS_IN_I16`], `b₀ + b₁` and `b₂ + b₃` must be within ±127.
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self;
    /// Adds lanes that hold i32.
    unsafe fn add_i32(self, y: Self) -> Self;
    /// Converts lanes that hold i32 to f32.
    unsafe fn i32_to_f32(self) -> Self;
    /// Converts integers below 2³¹ in magnitude to i32.
    unsafe fn f32_to_i32(self) -> Self;
}

/// [`LANES`] lanes in one or several registers. Each operation has the same result, bit by bit, for
/// every instruction set: the number of lanes is the same, and reductions have one order.
///
/// # Safety
/// As for [`Register`], whose methods have the same names and meanings.
#[allow(missing_docs)]
pub(crate) trait Vector: Copy + Send + Sync {
    /// Registers that a vector takes.
    const REGISTERS: usize;
    const ADDS_INT8_PAIRS_IN_I16: bool;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Reads `n ≤ LANES` values; the other lanes are 0.
    unsafe fn load_partial(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Writes the first `n ≤ LANES` values.
    unsafe fn store_partial(self, to: *mut f32, n: usize);
    unsafe fn fma(self, y: Self, z: Self) -> Self;
    unsafe fn add(self, y: Self) -> Self;
    unsafe fn sub(self, y: Self) -> Self;
    unsafe fn mul(self, y: Self) -> Self;
    unsafe fn div(self, y: Self) -> Self;
    unsafe fn max(self, y: Self) -> Self;
    unsafe fn min(self, y: Self) -> Self;
    unsafe fn round(self) -> Self;
    unsafe fn exp2_int(self) -> Self;
    unsafe fn mul_exp2(self, n: Self) -> Self;
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self;
    unsafe fn reduce_add(self) -> f32;
    unsafe fn reduce_max(self) -> f32;
    /// The value of lane 0.
    unsafe fn first(self) -> f32;
    /// Transposes the square matrix `rows` in place.
    unsafe fn transpose(rows: &mut [Self; LANES]);
    /// `x · H` for the Hadamard matrix of `LANES` rows: `(a + b, a − b)` for neighbouring lanes,
    /// then for lanes 2 apart, and so on.
    unsafe fn hadamard(self) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn pack_bf16(self, high: Self) -> Self;
    unsafe fn store_u8(self, to: *mut u8);
    unsafe fn pack_high_halves(self, high: Self) -> Self;
    unsafe fn even_bf16(self) -> Self;
    unsafe fn odd_bf16(self) -> Self;
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self;
    unsafe fn add_i32(self, y: Self) -> Self;
    unsafe fn i32_to_f32(self) -> Self;
    unsafe fn f32_to_i32(self) -> Self;
}

/// Implements [`Vector`] for `$n` registers, whose indices are `$i`. Loops over the registers would
/// keep the vectors in memory until the compiler unrolls them, which is too late for the
/// microkernels.
macro_rules! vector_of_registers {
    ($n:literal: $($i:literal)*) => {
        #[allow(unsafe_op_in_unsafe_fn)] // methods of registers; the trait states their contract
        impl<R: Register> Vector for [R; $n] {
            const REGISTERS: usize = $n;
            const ADDS_INT8_PAIRS_IN_I16: bool = R::ADDS_INT8_PAIRS_IN_I16;

            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                const { assert!($n * R::LANES == LANES) };
                [R::splat(x); $n]
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                [$(R::load(from.add($i * R::LANES))),*]
            }
            #[inline(always)]
            unsafe fn load_partial(from: *const f32, n: usize) -> Self {
                if n == LANES {
                    return Self::load(from);
                }
                [$(load_first(from.wrapping_add($i * R::LANES), n.saturating_sub($i * R::LANES))),*]
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                $(self[$i].store(to.add($i * R::LANES));)*
            }
            #[inline(always)]
            unsafe fn store_partial(self, to: *mut f32, n: usize) {
                // Without masked stores, layer normalisation is three times as fast on AMD's Zen 3.
                if n == LANES {
                    return self.store(to);
                }
                $(
                    let rest = n.saturating_sub($i * R::LANES);
                    store_first(self[$i], to.wrapping_add($i * R::LANES), rest);
                )*
            }
            #[inline(always)]
            unsafe fn fma(self, y: Self, z: Self) -> Self {
                [$(self[$i].fma(y[$i], z[$i])),*]
            }
            #[inline(always)]
            unsafe fn add(self, y: Self) -> Self {
                [$(self[$i].add(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn sub(self, y: Self) -> Self {
                [$(self[$i].sub(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn mul(self, y: Self) -> Self {
                [$(self[$i].mul(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn div(self, y: Self) -> Self {
                [$(self[$i].div(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn max(self, y: Self) -> Self {
                [$(self[$i].max(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn min(self, y: Self) -> Self {
                [$(self[$i].min(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn round(self) -> Self {
                [$(self[$i].round()),*]
            }
            #[inline(always)]
            unsafe fn exp2_int(self) -> Self {
                [$(self[$i].exp2_int()),*]
            }
            #[inline(always)]
            unsafe fn mul_exp2(self, n: Self) -> Self {
                [$(self[$i].mul_exp2(n[$i])),*]
            }
            #[inline(always)]
            unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
                [$(self[$i].select_negative(yes[$i], no[$i])),*]
            }
            #[inline(always)]
            unsafe fn reduce_add(mut self) -> f32 {
                let mut half = $n / 2;
                while half > 0 {
                    for i in 0..half {
                        self[i] = self[i].add(self[i + half]);
                    }
                    half /= 2;
                }
                self[0].reduce_add()
            }
            #[inline(always)]
            unsafe fn reduce_max(mut self) -> f32 {
                let mut half = $n / 2;
                while half > 0 {
                    for i in 0..half {
                        self[i] = self[i].max(self[i + half]);
                    }
                    half /= 2;
                }
                self[0].reduce_max()
            }
            #[inline(always)]
            unsafe fn first(self) -> f32 {
                let mut lanes = [0.0; LANES];
                self.store(lanes.as_mut_ptr());
                lanes[0]
            }
            #[inline(always)]
            unsafe fn transpose(rows: &mut [Self; LANES]) {
                let before = *rows;
                for row in 0..$n {
                    $(
                        let mut block = [R::splat(0.0); LANES];
                        for i in 0..R::LANES {
                            block[i] = before[row * R::LANES + i][$i];
                        }
                        transpose_block(&mut block);
                        for i in 0..R::LANES {
                            rows[$i * R::LANES + i][row] = block[i];
                        }
                    )*
                }
            }
            #[inline(always)]
            unsafe fn hadamard(self) -> Self {
                let mut out = [$(hadamard_of_register(self[$i])),*];
                let mut distance = 1;
                while distance < $n {
                    for i in (0..$n).filter(|i| i & distance == 0) {
                        let (a, b) = (out[i], out[i + distance]);
                        (out[i], out[i + distance]) = (a.add(b), a.sub(b));
                    }
                    distance *= 2;
                }
                out
            }
            #[inline(always)]
            unsafe fn load_f16(from: *const u16) -> Self {
                [$(R::load_f16(from.add($i * R::LANES))),*]
            }
            #[inline(always)]
            unsafe fn load_bf16(from: *const u16) -> Self {
                [$(R::load_bf16(from.add($i * R::LANES))),*]
            }
            #[inline(always)]
            unsafe fn store_bf16(self, to: *mut u16) {
                $(self[$i].store_bf16(to.add($i * R::LANES));)*
            }
            #[inline(always)]
            unsafe fn pack_bf16(self, high: Self) -> Self {
                [$(self[$i].pack_bf16(high[$i])),*]
            }
            #[inline(always)]
            unsafe fn store_u8(self, to: *mut u8) {
                $(self[$i].store_u8(to.add($i * R::LANES));)*
            }
            #[inline(always)]
            unsafe fn pack_high_halves(self, high: Self) -> Self {
                [$(self[$i].pack_high_halves(high[$i])),*]
            }
            #[inline(always)]
            unsafe fn even_bf16(self) -> Self {
                [$(self[$i].even_bf16()),*]
            }
            #[inline(always)]
            unsafe fn odd_bf16(self) -> Self {
                [$(self[$i].odd_bf16()),*]
            }
            #[inline(always)]
            unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
                [$(self[$i].dot_int8(b[$i], sum[$i])),*]
            }
            #[inline(always)]
            unsafe fn add_i32(self, y: Self) -> Self {
                [$(self[$i].add_i32(y[$i])),*]
            }
            #[inline(always)]
            unsafe fn i32_to_f32(self) -> Self {
                [$(self[$i].i32_to_f32()),*]
            }
            #[inline(always)]
            unsafe fn f32_to_i32(self) -> Self {
                [$(self[$i].f32_to_i32()),*]
            }
        }
    };
}

vector_of_registers!(1: 0);
vector_of_registers!(2: 0 1);
vector_of_registers!(4: 0 1 2 3);
vector_of_registers!(16: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// [`Register::load_partial`] for any `n`; at most `R::LANES` values are read.
///
/// # Safety
/// As for [`Register`].
#[inline(always)]
unsafe fn load_first<R: Register>(from: *const f32, n: usize) -> R {
    // SAFETY: upheld by the caller.
    unsafe { if n >= R::LANES { R::load(from) } else { R::load_partial(from, n) } }
}

/// [`Register::store_partial`] for any `n`; at most `R::LANES` values are written.
///
/// # Safety
/// As for [`Register`].
#[inline(always)]
unsafe fn store_first<R: Register>(x: R, to: *mut f32, n: usize) {
    // SAFETY: upheld by the caller.
    unsafe { if n >= R::LANES { x.store(to) } else { x.store_partial(to, n) } }
}

/// Transposes the square matrix of the first `R::LANES` registers, in place.
///
/// # Safety
/// As for [`Register`].
#[inline(always)]
unsafe fn transpose_block<R: Register>(block: &mut [R; LANES]) {
    // SAFETY: upheld by the caller.
    unsafe {
        exchange_rows::<R, 1>(block);
        exchange_rows::<R, 2>(block);
        exchange_rows::<R, 4>(block);
        exchange_rows::<R, 8>(block);
    }
}

/// The stage of [`transpose_block`] that exchanges lanes of rows that are `DISTANCE` apart. With a
/// constant distance, the compiler keeps the rows in registers.
///
/// # Safety
/// As for [`Register`].
#[inline(always)]
unsafe fn exchange_rows<R: Register, const DISTANCE: usize>(block: &mut [R; LANES]) {
    for i in 0..LANES {
        if i < R::LANES && DISTANCE < R::LANES && i & DISTANCE == 0 {
            // SAFETY: upheld by the caller; `DISTANCE` is a power of two below `R::LANES`.
            let (x, y) = unsafe { block[i].exchange(block[i + DISTANCE], DISTANCE) };
            (block[i], block[i + DISTANCE]) = (x, y);
        }
    }
}

/// The stages of [`Vector::hadamard`] within a register.
///
/// # Safety
/// As for [`Register`].
#[inline(always)]
unsafe fn hadamard_of_register<R: Register>(mut x: R) -> R {
    let mut stage = 0;
    while 1 << stage < R::LANES {
        // SAFETY: upheld by the caller; a row of `SIGNS` has as many values as the largest register
        // has lanes. The sum is rounded once, as a + b and a − b are.
        unsafe {
            x = x.fma(R::load(SIGNS[stage].as_ptr()), x.swap_lanes(1 << stage));
        }
        stage += 1;
    }
    x
}

/// For each stage of [`Vector::hadamard`], −1 in the lanes that are subtracted.
const SIGNS: [[f32; LANES]; 4] = {
    let mut signs = [[1.0; LANES]; 4];
    let (mut stage, mut lane) = (0, 0);
    while stage < 4 {
        if lane & 1 << stage != 0 {
            signs[stage][lane] = -1.0;
        }
        lane += 1;
        if lane == LANES {
            (stage, lane) = (stage + 1, 0);
        }
    }
    signs
};
