// LayerNorm(x + y) and LayerNorm(word + token type + position): (x − mean) / √(var + ε) · w + b.
// The variance is the mean square of the centred values. One warp per row; the row is read once and
// kept in registers.
#include "elements.cuh"

// Pairs per thread: rows have an even number of elements, at most 2 · 32 · PAIRS = 1,024, which
// is MAX_ROW in src/lib.rs.
const int PAIRS = 16;

template <typename T>
__device__ void normalise(float (&v)[PAIRS][2], const T *weight, const T *bias, T *out, int e,
                          float eps) {
    const int lane = threadIdx.x % 32;
    float sum = 0;
    for (int j = 0; j < PAIRS; j++)
        if (2 * (lane + 32 * j) < e) sum += v[j][0] + v[j][1];
    const float mean = sum_of<32>(sum) / e;
    float square = 0;
    for (int j = 0; j < PAIRS; j++)
        if (2 * (lane + 32 * j) < e) {
            v[j][0] -= mean;
            v[j][1] -= mean;
            square += v[j][0] * v[j][0] + v[j][1] * v[j][1];
        }
    const float scale = 1 / sqrtf(sum_of<32>(square) / e + eps);
    for (int j = 0; j < PAIRS; j++) {
        const int i = 2 * (lane + 32 * j);
        if (i < e) {
            const float2 w = load2(weight + i), b = load2(bias + i);
            store2(out + i, v[j][0] * scale * w.x + b.x, v[j][1] * scale * w.y + b.y);
        }
    }
}

// y may be null. The block size must be a multiple of 32.
template <typename T>
__device__ void add_layer_norm(const T *x, const T *y, const T *weight, const T *bias, T *out,
                               int rows, int e, float eps) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t at = (size_t)row * e;
    float v[PAIRS][2];
    for (int j = 0; j < PAIRS; j++) {
        const int i = 2 * (lane + 32 * j);
        if (i < e) {
            const float2 a = load2(x + at + i);
            v[j][0] = a.x;
            v[j][1] = a.y;
            if (y) {
                const float2 b = load2(y + at + i);
                v[j][0] += b.x;
                v[j][1] += b.y;
            }
        }
    }
    normalise(v, weight, bias, out + at, e, eps);
}

// The number of rows of each table.
struct TableRows {
    uint32_t words, types, positions;
};

// The output row of a token is NaN if one of its ids is not below its table's number of rows.
template <typename T>
__device__ void embed_layer_norm(const uint32_t *word_ids, const uint32_t *type_ids,
                                 const uint32_t *position_ids, const T *words, const T *types,
                                 const T *positions, const T *weight, const T *bias, T *out,
                                 int rows, int e, float eps, TableRows table_rows) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const uint32_t i_word = word_ids[row], i_type = type_ids[row], i_position = position_ids[row];
    if (i_word >= table_rows.words || i_type >= table_rows.types ||
        i_position >= table_rows.positions) {
        for (int i = 2 * lane; i < e; i += 64) store2(out + (size_t)row * e + i, NAN, NAN);
        return;
    }
    const T *word = words + (size_t)i_word * e, *type = types + (size_t)i_type * e,
            *position = positions + (size_t)i_position * e;
    float v[PAIRS][2];
    for (int j = 0; j < PAIRS; j++) {
        const int i = 2 * (lane + 32 * j);
        if (i < e) {
            const float2 a = load2(word + i), b = load2(type + i), c = load2(position + i);
            v[j][0] = a.x + b.x + c.x;
            v[j][1] = a.y + b.y + c.y;
        }
    }
    normalise(v, weight, bias, out + (size_t)row * e, e, eps);
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void add_layer_norm_##name(const T *x, const T *y, const T *weight,      \
                                                     const T *bias, T *out, int rows, int e,       \
                                                     float eps) {                                  \
        add_layer_norm(x, y, weight, bias, out, rows, e, eps);                                     \
    }                                                                                              \
    extern "C" __global__ void embed_layer_norm_##name(                                            \
        const uint32_t *word_ids, const uint32_t *type_ids, const uint32_t *position_ids,          \
        const T *words, const T *types, const T *positions, const T *weight, const T *bias,        \
        T *out, int rows, int e, float eps, uint32_t n_words, uint32_t n_types,                    \
        uint32_t n_positions) {                                                                    \
        embed_layer_norm(word_ids, type_ids, position_ids, words, types, positions, weight, bias,  \
                         out, rows, e, eps, {n_words, n_types, n_positions});                      \
    }
FOR_ALL(KERNELS)
