// activation(y + bias) in place, for products computed without bias and activation. One thread per
// pair of elements.
#include "elements.cuh"

// The same order as the codes in the Rust function `epilogue`.
enum Activation { NONE, GELU, GELU_TANH, RELU, SILU, TANH, QUICK_GELU, MISH };

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
    default: return x;
    }
}

// bias may be null. columns must be even.
template <typename T>
__device__ void epilogue(T *y, const T *bias, int64_t pairs, int columns, int activation) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    float2 x = load2(y + 2 * i);
    if (bias) {
        const float2 b = load2(bias + 2 * i % columns);
        x.x += b.x;
        x.y += b.y;
    }
    store2(y + 2 * i, activated(x.x, activation), activated(x.y, activation));
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void epilogue_##name(T *y, const T *bias, int64_t pairs, int columns,    \
                                               int activation) {                                   \
        epilogue(y, bias, pairs, columns, activation);                                             \
    }
FOR_ALL(KERNELS)
