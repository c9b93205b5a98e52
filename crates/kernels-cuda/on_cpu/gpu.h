// As much of CUDA's language as our kernels and candle's use, on a CPU. What they compute can so be
// checked without a GPU; how fast, cannot.
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <immintrin.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

// What a kernel has asked for at its launch.
extern char *dynamic_shared;

// One block after another; a block's threads take turns, and wait where they wait for each other.
void launch(Dim grid, Dim block, size_t shared, const std::function<void()> &kernel);
inline void launch(Dim grid, unsigned threads, const std::function<void()> &kernel) {
    launch(grid, {threads, 1, 1}, 0, kernel);
}
void __syncthreads();
void __syncwarp();

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

template <typename A, typename B> inline std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B> inline std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
using std::isnan, std::signbit;
inline float normcdff(float x) { return 0.5f * erfcf(-x * (float)M_SQRT1_2); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

template <typename To, typename From> inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline double __longlong_as_double(long long x) { return bits_of<double>(x); }
inline long long __double_as_longlong(double x) { return bits_of<long long>(x); }

// Nobody else's turn.
template <typename T, typename V> inline T atomicAdd(T *to, V x) {
    const T old = *to;
    *to = old + x;
    return old;
}
template <typename T, typename V> inline T atomicMax(T *to, V x) {
    const T old = *to;
    if ((T)x > old) *to = x;
    return old;
}
template <typename T, typename V> inline T atomicMin(T *to, V x) {
    const T old = *to;
    if ((T)x < old) *to = x;
    return old;
}
template <typename T, typename U, typename V> inline T atomicCAS(T *to, U expected, V x) {
    const T old = *to;
    if (old == (T)expected) *to = x;
    return old;
}

// Numbers of fewer bits, which compute in f32.
template <typename Self> struct Assigned {
    Self &self() { return *static_cast<Self *>(this); }
    template <typename V> Self &operator+=(V x) { return self() = Self((float)self() + (float)x); }
    template <typename V> Self &operator-=(V x) { return self() = Self((float)self() - (float)x); }
    template <typename V> Self &operator*=(V x) { return self() = Self((float)self() * (float)x); }
    template <typename V> Self &operator/=(V x) { return self() = Self((float)self() / (float)x); }
};
template <typename V> using Arithmetic = std::enable_if_t<std::is_arithmetic_v<V>>;
struct __half : Assigned<__half> {
    uint16_t bits;
    __half() = default;
    template <typename V, typename = Arithmetic<V>> __half(V x) {
        bits = _cvtss_sh((float)x, _MM_FROUND_TO_NEAREST_INT);
    }
    operator float() const { return _cvtsh_ss(bits); }
};
struct __nv_bfloat16 : Assigned<__nv_bfloat16> {
    uint16_t bits;
    __nv_bfloat16() = default;
    template <typename V, typename = Arithmetic<V>> __nv_bfloat16(V x) {
        const uint32_t wide = bits_of<uint32_t>((float)x);
        bits = isnan((float)x) ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
    operator float() const { return bits_of<float>((uint32_t)bits << 16); }
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return bits_of<__half>(bits); }
inline bool __hisnan(__half x) { return isnan((float)x); }
inline bool __hisnan(__nv_bfloat16 x) { return isnan((float)x); }
#define OF_TWO(name, sign)                                                                         \
    inline __nv_bfloat162 name(__nv_bfloat162 a, __nv_bfloat162 b) {                               \
        return {(float)a.x sign(float) b.x, (float)a.y sign(float) b.y};                           \
    }
OF_TWO(__hadd2, +)
OF_TWO(__hsub2, -)
OF_TWO(__hmul2, *)
#define OF_ONE(name, function)                                                                     \
    inline __half name(__half x) { return function((float)x); }                                    \
    inline __nv_bfloat16 name(__nv_bfloat16 x) { return function((float)x); }
OF_ONE(hsqrt, sqrtf)
OF_ONE(hcos, cosf)
OF_ONE(hsin, sinf)
OF_ONE(hlog, logf)
OF_ONE(hexp, expf)
OF_ONE(__habs, fabsf)
#define OF_BOTH(name, function)                                                                    \
    template <typename T> inline T name(T a, T b) {                                                \
        return __hisnan(a) || __hisnan(b) ? T(NAN) : T(function(a, b));                            \
    }
OF_BOTH(__hmax_nan, fmaxf)
OF_BOTH(__hmin_nan, fminf)

// candle has kernels of 8-bit numbers too, which nobody here runs.
struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    template <typename V> __nv_fp8_e4m3(V) { abort(); }
    operator float() const { abort(); }
};
enum { __NV_E4M3 };
inline __half __nv_cvt_fp8_to_halfraw(uint8_t, int) { abort(); }

// What the lanes of a warp show each other.
int warp_of_block();
int lane_of_warp();
template <typename V> struct Shown {
    V lanes[32];
};
template <typename V> inline Shown<V> shown(const V &own) {
    static Shown<V> all[32];
    V &shown = all[warp_of_block()].lanes[lane_of_warp()];
    shown = own;
    __syncwarp();
    const Shown<V> seen = all[warp_of_block()];
    __syncwarp();
    return seen;
}
template <typename V> inline V __shfl_xor_sync(unsigned, V x, int mask, int = 32) {
    return shown(x).lanes[lane_of_warp() ^ mask];
}

// What cuda/numbers.cuh has for a GPU.
typedef __half f16;
typedef __nv_bfloat16 bf16;
template <typename T> inline float2 load2(const T *p) { return {p[0], p[1]}; }
template <typename T> inline void store2(T *p, float x, float y) {
    p[0] = x;
    p[1] = y;
}

// mma.m16n8k16: where PTX says that the numbers of a and b lie.
struct Factors {
    uint32_t a[4], b[2];
};
template <typename T> inline float half_of(uint32_t both, int which) {
    return bits_of<T>((uint16_t)(both >> 16 * which));
}
template <typename T>
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    const Shown<Factors> all = shown(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = lane_of_warp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const int of_a = row % 8 * 4 + k % 8 / 2, of_b = column * 4 + k % 8 / 2;
            const uint32_t left = all.lanes[of_a].a[row / 8 + k / 8 * 2];
            const uint32_t right = all.lanes[of_b].b[k / 8];
            c[i] += half_of<T>(left, k % 2) * half_of<T>(right, k % 2);
        }
    }
}
