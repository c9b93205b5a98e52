// Emulates on a CPU the part of CUDA's language that our kernels and those of candle use. Tests
// of the kernels' results therefore need no GPU. The speed of the emulation is not that of a GPU.
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <immintrin.h>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

// The dynamic shared memory of the launch.
extern char *dynamic_shared;
#define DYNAMIC_SHARED(name) char *name = dynamic_shared

// Runs the blocks one after another. The threads of a block take turns and switch at barriers.
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

// Threads switch at barriers only, so the atomic operations need no synchronisation.
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

// 16-bit floats. Arithmetic converts them to f32.
template <typename Self> struct CompoundAssignment {
    Self &self() { return *static_cast<Self *>(this); }
    template <typename V> Self &operator+=(V x) { return self() = Self((float)self() + (float)x); }
    template <typename V> Self &operator-=(V x) { return self() = Self((float)self() - (float)x); }
    template <typename V> Self &operator*=(V x) { return self() = Self((float)self() * (float)x); }
    template <typename V> Self &operator/=(V x) { return self() = Self((float)self() / (float)x); }
};
template <typename V> using Arithmetic = std::enable_if_t<std::is_arithmetic_v<V>>;
struct __half : CompoundAssignment<__half> {
    uint16_t bits;
    __half() = default;
    template <typename V, typename = Arithmetic<V>> __half(V x) {
        bits = _cvtss_sh((float)x, _MM_FROUND_TO_NEAREST_INT);
    }
    operator float() const { return _cvtsh_ss(bits); }
};
struct __nv_bfloat16 : CompoundAssignment<__nv_bfloat16> {
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
#define DEFINE_BFLOAT162_BINARY(name, sign)                                                        \
    inline __nv_bfloat162 name(__nv_bfloat162 a, __nv_bfloat162 b) {                               \
        return {(float)a.x sign(float) b.x, (float)a.y sign(float) b.y};                           \
    }
DEFINE_BFLOAT162_BINARY(__hadd2, +)
DEFINE_BFLOAT162_BINARY(__hsub2, -)
DEFINE_BFLOAT162_BINARY(__hmul2, *)
#define DEFINE_UNARY(name, function)                                                               \
    inline __half name(__half x) { return function((float)x); }                                    \
    inline __nv_bfloat16 name(__nv_bfloat16 x) { return function((float)x); }
DEFINE_UNARY(hsqrt, sqrtf)
DEFINE_UNARY(hcos, cosf)
DEFINE_UNARY(hsin, sinf)
DEFINE_UNARY(hlog, logf)
DEFINE_UNARY(hexp, expf)
DEFINE_UNARY(__habs, fabsf)
#define DEFINE_BINARY(name, function)                                                              \
    template <typename T> inline T name(T a, T b) {                                                \
        return __hisnan(a) || __hisnan(b) ? T(NAN) : T(function(a, b));                            \
    }
DEFINE_BINARY(__hmax_nan, fmaxf)
DEFINE_BINARY(__hmin_nan, fminf)

// candle's kernels for 8-bit floats must compile but are never run.
struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    template <typename V> __nv_fp8_e4m3(V) { abort(); }
    operator float() const { abort(); }
};
enum { __NV_E4M3 };
inline __half __nv_cvt_fp8_to_halfraw(uint8_t, int) { abort(); }

int warp_of_block();
int lane_of_warp();
template <typename V> struct WarpValues {
    V lanes[32];
};
// Returns the values of all lanes of the warp. `own` is the value of the calling lane.
template <typename V> inline WarpValues<V> exchange(const V &own) {
    static WarpValues<V> all[32];
    all[warp_of_block()].lanes[lane_of_warp()] = own;
    __syncwarp();
    const WarpValues<V> values = all[warp_of_block()];
    __syncwarp();
    return values;
}
template <typename V> inline V __shfl_xor_sync(unsigned, V x, int mask, int = 32) {
    return exchange(x).lanes[lane_of_warp() ^ mask];
}

// The types and functions that cuda/elements.cuh defines for a GPU.
typedef __half f16;
typedef __nv_bfloat16 bf16;
template <typename T> inline float2 load2(const T *p) { return {p[0], p[1]}; }
template <typename T> inline void store2(T *p, float x, float y) {
    p[0] = x;
    p[1] = y;
}

// mma.m16n8k16 with the distribution of a, b and c over the lanes that PTX defines.
struct Factors {
    uint32_t a[4], b[2];
};
template <typename T> inline float element_of(uint32_t pair, int which) {
    return bits_of<T>((uint16_t)(pair >> 16 * which));
}
template <typename T>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    const WarpValues<Factors> all = exchange(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = lane_of_warp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const int a_lane = row % 8 * 4 + k % 8 / 2, b_lane = column * 4 + k % 8 / 2;
            const uint32_t left = all.lanes[a_lane].a[row / 8 + k / 8 * 2];
            const uint32_t right = all.lanes[b_lane].b[k / 8];
            c[i] += element_of<T>(left, k % 2) * element_of<T>(right, k % 2);
        }
    }
}

inline void load_matrices(uint32_t (&m)[4], const void *row) {
    assert((uintptr_t)row % 16 == 0);
    const WarpValues<const void *> rows = exchange(row);
    const int lane = lane_of_warp();
    for (int i = 0; i < 4; i++)
        m[i] = static_cast<const uint32_t *>(rows.lanes[8 * i + lane / 4])[lane % 4];
}
inline void load_matrices_transposed(uint32_t (&m)[4], const void *row) {
    assert((uintptr_t)row % 16 == 0);
    const WarpValues<const void *> rows = exchange(row);
    const int lane = lane_of_warp();
    for (int i = 0; i < 4; i++) {
        const auto element = [&](int k) {
            return static_cast<const uint16_t *>(rows.lanes[8 * i + k])[lane / 4];
        };
        m[i] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
    }
}

// The asynchronous copies (cp.async) of each thread of the block, in the order of their groups.
// The emulator executes a copy as late as the kernel allows, so that a missing wait gives a wrong
// result.
struct Copy {
    void *to;
    const void *from; // null for zeros
};
typedef std::deque<std::vector<Copy>> CopyGroups;
CopyGroups &copy_groups_of_thread();
inline void copy_or_zero(void *to, const void *from, bool copy) {
    assert((uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0);
    CopyGroups &groups = copy_groups_of_thread();
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({to, copy ? from : nullptr});
}
inline void commit_copies() { copy_groups_of_thread().emplace_back(); }
template <int N> inline void wait_for_copies() {
    CopyGroups &groups = copy_groups_of_thread();
    while (groups.size() > N + 1) { // the last group is not committed
        for (Copy copy : groups.front())
            copy.from ? memcpy(copy.to, copy.from, 16) : memset(copy.to, 0, 16);
        groups.pop_front();
    }
}
inline float approximate_exp2(float x) { return exp2f(x); }
