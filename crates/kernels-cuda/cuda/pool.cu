// The mean over the tokens of each packed sequence, none of them empty, in f32. A block for a part of
// a sequence's columns, a thread two of them.
#include "numbers.cuh"

template <typename T>
__device__ void mean_pool(const T *hidden, const uint32_t *offsets, float *out, int e) {
    const int i = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= e) return;
    const uint32_t start = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    float x = 0, y = 0;
    for (uint32_t token = start; token < end; token++) {
        const float2 both = load2(hidden + (size_t)token * e + i);
        x += both.x;
        y += both.y;
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
