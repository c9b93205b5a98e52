// Element types f32, f16 and bf16: loads and stores of pairs and groups, copies to shared memory,
// and the tensor cores' matrix product for 16-bit types. All sums are in f32.
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

// Loads four 8 × 8 matrices of 16-bit elements from shared memory. Each lane passes the address of
// row lane % 8 of matrix lane / 8, and receives two neighbouring elements of row lane / 4 of each
// matrix, from column 2 · (lane % 4) on: the layout of `b` of `mma`. Transposed, the lane receives
// two neighbouring elements of column lane / 4, from row 2 · (lane % 4) on.
__device__ inline void load_matrices(uint32_t (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// Asynchronous copies of 16 bytes from global to shared memory, or zeros if `copy` is false.
// `commit_copies` puts the copies that this thread started since the last call into a group.
// `wait_for_copies<N>` waits until all of this thread's groups but the N newest are complete.
__device__ inline void copy_or_zero(void *to, const void *from, bool copy) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(copy ? 16 : 0)
                 : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The dynamic shared memory of the block.
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

// 2ˣ with a relative error of at most 2⁻²², or 0 if 2ˣ is less than 2⁻¹²⁶.
__device__ inline float approximate_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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

// N elements, loaded and stored with as few instructions as possible. The address must be a
// multiple of the size of the N elements in bytes, or of 16 if this size is larger than 16.
template <int N, typename T> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Elements {
    T all[N];
};
template <int N, typename T> __device__ inline void load(float (&x)[N], const T *p) {
    const Elements<N, T> elements = *reinterpret_cast<const Elements<N, T> *>(p);
    for (int i = 0; i < N; i += 2) {
        const float2 pair = load2(elements.all + i);
        x[i] = pair.x;
        x[i + 1] = pair.y;
    }
}
template <int N, typename T> __device__ inline void store(T *p, const float (&x)[N]) {
    Elements<N, T> elements;
    for (int i = 0; i < N; i += 2) store2(elements.all + i, x[i], x[i + 1]);
    *reinterpret_cast<Elements<N, T> *>(p) = elements;
}

// Whether rows of e elements at these addresses can be loaded in groups of eight elements.
template <typename... Pointers> __device__ inline bool fit_groups_of_8(int e, Pointers... rows) {
    return e % 8 == 0 && (... && ((uintptr_t)rows % 16 == 0));
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

// Sum over the threads of a block, whose number must be a multiple of 32. A kernel can call it once
// for each CALL: a second call could overwrite the sums before all threads have read them.
template <int CALL = 0> __device__ inline float sum_of_block(float x) {
    __shared__ float of_warps[32];
    x = sum_of<32>(x);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) sum += of_warps[warp];
    return sum;
}

// Defines a kernel for each element type.
#define FOR_ALL(define) define(f32, float) define(f16, f16) define(bf16, bf16)
