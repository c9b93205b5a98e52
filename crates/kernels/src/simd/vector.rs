//! [`Vector`]: the SIMD operations that kernels are written with.

/// The largest [`Vector::LANES`].
pub(crate) const MAX_LANES: usize = 16;

/// A SIMD register of [`Self::LANES`] lanes of 32 bits. A lane holds an f32 unless stated
/// otherwise.
///
/// # Safety
/// All methods require that the CPU supports the instructions of the implementing type, which an
/// [`Isa`](crate::Isa) proves. Methods that take a pointer access as many elements as they state,
/// at any alignment.
pub(crate) trait Vector: Copy + Send + Sync {
    const LANES: usize;
    /// Whether [`Self::dot_int8`] adds adjacent products in 16 bits, so that the sum of two
    /// adjacent weights must be within ±127.
    const ADDS_INT8_PAIRS_IN_I16: bool = false;

    unsafe fn splat(x: f32) -> Self;
    /// Reads `LANES` values.
    unsafe fn load(from: *const f32) -> Self;
    /// Reads `n ≤ LANES` values; the other lanes are 0.
    unsafe fn load_partial(from: *const f32, n: usize) -> Self;
    /// Writes `LANES` values.
    unsafe fn store(self, to: *mut f32);
    /// Writes the first `n ≤ LANES` values.
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
    /// The sum of all lanes.
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
}
