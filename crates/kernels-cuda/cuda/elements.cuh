// Element types f32, f16 and bf16: loads and stores of pairs, and the tensor cores' matrix product
// for 16-bit types. All sums are in f32.
#pragma once

#ifdef __CUDACC__
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __half f16;
typedef __nv_bfloat16 bf16;

__device__ inline float2 load2(const float *p) { return *reinterpret_cast<const float2 *>(p); }
__device__ inline float2 load2(const f16 *p) {
    return __half22float2(*reinterpret_cast<const __half2 *>(p));
}
__device__ inline float2 load2(const bf16 *p) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(p));
}

__device__ inline void store2(float *p, float x, float y) {
    *reinterpret_cast<float2 *>(p) = make_float2(x, y);
}
__device__ inline void store2(f16 *p, float x, float y) {
    *reinterpret_cast<__half2 *>(p) = __floats2half2_rn(x, y);
}
__device__ inline void store2(bf16 *p, float x, float y) {
    *reinterpret_cast<__nv_bfloat162 *>(p) = __floats2bfloat162_rn(x, y);
}

// c += a·b. The matrix `a` is 16 × 16, row-major; `b` is 16 × 8, column-major; `c` is 16 × 8, in
// f32. The matrices are distributed over the registers of a warp as PTX defines it for
// mma.m16n8k16.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
#include "../on_cpu/gpu.h"
#endif

// Two 16-bit elements in one register: loaded from memory, or rounded from f32.
template <typename T> __device__ inline uint32_t load_pair(const T *p) {
    return *reinterpret_cast<const uint32_t *>(p);
}
template <typename T> __device__ inline uint32_t pack_pair(float x, float y) {
    uint32_t packed;
    store2(reinterpret_cast<T *>(&packed), x, y);
    return packed;
}

__device__ inline float4 *as_float4(float *p) { return reinterpret_cast<float4 *>(p); }
__device__ inline const float4 *as_float4(const float *p) {
    return reinterpret_cast<const float4 *>(p);
}

// Sum and maximum over each group of LANES neighbouring threads of a warp.
template <int LANES> __device__ inline float sum_of(float x) {
    for (int lane = LANES / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}
template <int LANES> __device__ inline float max_of(float x) {
    for (int lane = LANES / 2; lane > 0; lane /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane));
    return x;
}

// Defines a kernel for each element type.
#define FOR_ALL(define) define(f32, float) define(f16, f16) define(bf16, bf16)
