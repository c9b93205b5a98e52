// Rotary position embedding in place: the values i and i + D / 2 of each token and head are rotated
// as a pair. A thread rotates groups of 8 pairs if half, the number of pairs, is a multiple of 8 and
// the addresses are multiples of 16 bytes, otherwise groups of 2.
#include "elements.cuh"

template <int N, typename T>
__device__ void rotate_groups(T *x, const float *cos, const float *sin, int64_t head_stride,
                              int64_t token_stride, uint32_t heads, uint32_t tokens,
                              uint32_t half) {
    const uint32_t groups = half / N, step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < tokens * heads * groups; i += step) {
        const uint32_t pair = i % groups * N, head = i / groups % heads, token = i / groups / heads;
        T *at = x + head * head_stride + token * token_stride + pair;
        float a[N], b[N], c[N], s[N];
        load(a, at);
        load(b, at + half);
        load(c, cos + (size_t)token * half + pair);
        load(s, sin + (size_t)token * half + pair);
        for (int j = 0; j < N; j++) {
            const float first = a[j];
            a[j] = first * c[j] - b[j] * s[j];
            b[j] = b[j] * c[j] + first * s[j];
        }
        store(at, a);
        store(at + half, b);
    }
}

// half and the strides are even.
template <typename T>
__device__ void rotate(T *x, const float *cos, const float *sin, int64_t head_stride,
                       int64_t token_stride, uint32_t heads, uint32_t tokens, uint32_t half) {
    if (fit_groups_of_8(half, x, x + head_stride, x + token_stride, cos, sin))
        rotate_groups<8>(x, cos, sin, head_stride, token_stride, heads, tokens, half);
    else
        rotate_groups<2>(x, cos, sin, head_stride, token_stride, heads, tokens, half);
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void rotate_##name(T *x, const float *cos, const float *sin,             \
                                             int64_t head_stride, int64_t token_stride,            \
                                             uint32_t heads, uint32_t tokens, uint32_t half) {     \
        rotate(x, cos, sin, head_stride, token_stride, heads, tokens, half);                       \
    }
FOR_ALL(KERNELS)
