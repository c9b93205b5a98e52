// The mean over the tokens of each ragged sequence, and normalisation of rows to length 1.
#include "elements.cuh"

// An empty sequence yields NaN. blockIdx.x is the sequence; each thread computes two columns.
template <typename T>
__device__ void mean_pool(const T *hidden, const uint32_t *offsets, float *out, int e) {
    const int i = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= e) return;
    const uint32_t start = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    float x = 0, y = 0;
    for (uint32_t token = start; token < end; token++) {
        const float2 pair = load2(hidden + (size_t)token * e + i);
        x += pair.x;
        y += pair.y;
    }
    const float n = end - start;
    store2(out + (size_t)blockIdx.x * e + i, x / n, y / n);
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void mean_pool_##name(const T *hidden, const uint32_t *offsets,          \
                                                float *out, int e) {                               \
        mean_pool(hidden, offsets, out, e);                                                        \
    }
FOR_ALL(KERNELS)

// x / max(√Σx², 1e-12). A row with a NaN becomes NaN. One warp per row.
extern "C" __global__ void l2_normalize(const float *x, float *out, int rows, int e) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t at = (size_t)row * e;
    float square = 0;
    for (int i = lane; i < e; i += 32) square += x[at + i] * x[at + i];
    const float norm = sqrtf(sum_of<32>(square)), length = norm < 1e-12f ? 1e-12f : norm;
    for (int i = lane; i < e; i += 32) out[at + i] = x[at + i] / length;
}
