// As much of CUDA as the kernels use, on a CPU: a thread for each of a block's, one block after
// another. What they compute can so be checked without a GPU; how fast, cannot.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <immintrin.h>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim {
    unsigned x, y, z;
};
inline thread_local Dim threadIdx;
inline Dim blockIdx, blockDim, gridDim;

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

inline float widened(f16 x) { return _cvtsh_ss(x.bits); }
inline float widened(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
inline void round_to(f16 &to, float x) { to.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline void round_to(bf16 &to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widened(float x) { return x; }
inline void round_to(float &to, float x) { to = x; }

template <typename T> inline float2 load2(const T *p) { return {widened(p[0]), widened(p[1])}; }
template <typename T> inline void store2(T *p, float x, float y) {
    round_to(p[0], x);
    round_to(p[1], y);
}

// A block's threads wait for each other, and so do a warp's.
inline std::unique_ptr<std::barrier<>> of_block;
inline std::vector<std::unique_ptr<std::barrier<>>> of_warp;
inline void __syncthreads() { of_block->arrive_and_wait(); }

// What the lanes of a warp show each other.
template <typename V> struct Shown {
    V lanes[32];
};
template <typename V> inline Shown<V> shown(const V &own) {
    static V all[32][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    all[warp][lane] = own;
    of_warp[warp]->arrive_and_wait();
    Shown<V> seen;
    for (int i = 0; i < 32; i++) seen.lanes[i] = all[warp][i];
    of_warp[warp]->arrive_and_wait();
    return seen;
}
inline void __syncwarp() { of_warp[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
    return shown(x).lanes[threadIdx.x % 32 ^ mask];
}

// mma.m16n8k16: where PTX says that the numbers of a and b lie.
struct Factors {
    uint32_t a[4], b[2];
};
template <typename T> inline float half_of(uint32_t both, int which) {
    T x;
    x.bits = which ? both >> 16 : both & 0xffff;
    return widened(x);
}
template <typename T>
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
    const Shown<Factors> all = shown(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = threadIdx.x % 32;
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

inline void launch(Dim grid, unsigned threads, const std::function<void()> &kernel) {
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = {x, y, 0};
            of_block = std::make_unique<std::barrier<>>(threads);
            of_warp.clear();
            for (unsigned warp = 0; warp < threads / 32; warp++)
                of_warp.push_back(std::make_unique<std::barrier<>>(32));
            std::vector<std::thread> all;
            for (unsigned i = 0; i < threads; i++)
                all.emplace_back([&, i] {
                    threadIdx = {i, 0, 0};
                    kernel();
                });
            for (auto &thread : all) thread.join();
        }
}
