// activation(y + bias) in place, for products computed without bias and activation, or
// activation(y + bias) · (factor + factor_bias), as in gated feed-forward networks. A thread
// computes groups of 8 elements if the row length is a multiple of 8 and the addresses are
// multiples of 16 bytes, otherwise groups of 2.
#include "elements.cuh"

// The same order as the codes in the Rust function `epilogue`.
enum Activation { NONE, GELU, GELU_TANH, RELU, SILU, TANH, QUICK_GELU, MISH, SIGMOID };

__device__ inline float activated(float x, int activation) {
    switch (activation) {
    case GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case RELU: return x > 0 ? x : (x != x ? x : 0);
    case SILU: return x / (1 + expf(-x));
    case TANH: return tanhf(x);
    case QUICK_GELU: return x / (1 + expf(-1.702f * x));
    case MISH: {
        const float e = expf(fminf(x, 20)), n = e * (e + 2); // tanh(ln(1 + eˣ)) = n / (n + 2)
        return x * (n / (n + 2));
    }
    case SIGMOID: return 1 / (1 + expf(-x));
    default: return x;
    }
}

template <int N, typename T>
__device__ void epilogue_of_groups(T *y, const T *bias, const T *factor, const T *factor_bias,
                                   uint32_t elements, uint32_t columns, int activation) {
    const uint32_t groups_per_row = columns / N, step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < elements / N; i += step) {
        const uint32_t column = i % groups_per_row * N;
        float x[N], b[N] = {};
        T *at = y + (size_t)i * N;
        load(x, at);
        if (bias) load(b, bias + column);
        for (int j = 0; j < N; j++) x[j] = activated(x[j] + b[j], activation);
        if (factor) {
            float f[N], c[N] = {};
            load(f, factor + (size_t)i * N);
            if (factor_bias) load(c, factor_bias + column);
            for (int j = 0; j < N; j++) x[j] *= f[j] + c[j];
        }
        store(at, x);
    }
}

// bias, factor and factor_bias may be null. columns must be even and divide the number of elements.
template <typename T>
__device__ void epilogue(T *y, const T *bias, const T *factor, const T *factor_bias,
                         uint32_t elements, uint32_t columns, int activation) {
    if (fit_groups_of_8(columns, y, bias, factor, factor_bias))
        epilogue_of_groups<8>(y, bias, factor, factor_bias, elements, columns, activation);
    else
        epilogue_of_groups<2>(y, bias, factor, factor_bias, elements, columns, activation);
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void epilogue_##name(T *y, const T *bias, const T *factor,               \
                                               const T *factor_bias, uint32_t elements,            \
                                               uint32_t columns, int activation) {                 \
        epilogue(y, bias, factor, factor_bias, elements, columns, activation);                     \
    }
FOR_ALL(KERNELS)
