// Rotary position embedding in place: the values i and i + D / 2 of each token and head are rotated
// as a pair. A thread rotates groups of 8 pairs if half, the number of pairs, is a multiple of 8 and
// the addresses are multiples of 16 bytes, otherwise groups of 2.
//
// With RMSNorm of each head before the rotation, or instead of it: one warp per token and head.
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

// x / √(mean(x²) + ε) · weight, then the rotation unless cos is null. The weight is that of queries
// in the first heads and that of keys in the others. half and the strides are even.
template <typename T>
__device__ void normalise_heads(T *x, const float *query, const float *key, const float *cos,
                                const float *sin, int64_t head_stride, int64_t token_stride,
                                uint32_t query_heads, uint32_t heads, uint32_t tokens,
                                uint32_t half, float eps) {
    const uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= heads * tokens) return;
    const uint32_t head = row % heads, token = row / heads, first = 2 * (threadIdx.x % 32);
    const float *weight = head < query_heads ? query : key;
    T *at = x + head * head_stride + token * token_stride;
    float square = 0;
    for (uint32_t i = first; i < half; i += 64) {
        const float2 a = load2(at + i), b = load2(at + half + i);
        square += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
    }
    const float scale = 1 / sqrtf(sum_of<32>(square) / (2 * half) + eps);
    for (uint32_t i = first; i < half; i += 64) {
        float2 a = load2(at + i), b = load2(at + half + i);
        const float2 of_a = load2(weight + i), of_b = load2(weight + half + i);
        a.x *= scale * of_a.x;
        a.y *= scale * of_a.y;
        b.x *= scale * of_b.x;
        b.y *= scale * of_b.y;
        if (cos) {
            const size_t angle = (size_t)token * half + i;
            const float2 c = load2(cos + angle), s = load2(sin + angle), old = a;
            a.x = old.x * c.x - b.x * s.x;
            a.y = old.y * c.y - b.y * s.y;
            b.x = b.x * c.x + old.x * s.x;
            b.y = b.y * c.y + old.y * s.y;
        }
        store2(at + i, a.x, a.y);
        store2(at + half + i, b.x, b.y);
    }
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void rotate_##name(T *x, const float *cos, const float *sin,             \
                                             int64_t head_stride, int64_t token_stride,            \
                                             uint32_t heads, uint32_t tokens, uint32_t half) {     \
        rotate(x, cos, sin, head_stride, token_stride, heads, tokens, half);                       \
    }                                                                                              \
    extern "C" __global__ void normalise_heads_##name(                                             \
        T *x, const float *query, const float *key, const float *cos, const float *sin,            \
        int64_t head_stride, int64_t token_stride, uint32_t query_heads, uint32_t heads,           \
        uint32_t tokens, uint32_t half, float eps) {                                               \
        normalise_heads(x, query, key, cos, sin, head_stride, token_stride, query_heads, heads,    \
                        tokens, half, eps);                                                        \
    }
FOR_ALL(KERNELS)
