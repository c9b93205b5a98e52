// LayerNorm(x + y) and LayerNorm(word + token type + position): (x − mean) / √(var + ε) · w + b.
// The variance is the mean square of the centred values. One warp per row; the row is read once and
// kept in registers. RMSNorm(x + y): x / √(mean(x²) + ε) · w. The template parameter N is the number of elements per load: 8 if the row
// length is a multiple of 8 and the addresses are multiples of 16 bytes, otherwise 2.
#include "elements.cuh"

// Maximum length of a row for LayerNorm, as in src/lib.rs. The length of every row must be even.
const int MAX_ROW = 1024;

// The elements of a row that a thread keeps: groups of N, every 32nd group of the row.
template <int N> using Kept = float[MAX_ROW / 32 / N][N];

// Calls `with(values, column)` for each group that this thread keeps of a row of e elements.
template <int N, typename F> __device__ inline void for_groups(Kept<N> &x, int e, F with) {
    for (int j = 0; j < MAX_ROW / 32 / N; j++) {
        const int column = N * (threadIdx.x % 32 + 32 * j);
        if (column < e) with(x[j], column);
    }
}

template <int N, typename T>
__device__ void normalise(Kept<N> &x, const T *weight, const T *bias, T *out, int e, float eps) {
    float sum = 0;
    for_groups<N>(x, e, [&](float(&group)[N], int) {
        for (int i = 0; i < N; i++) sum += group[i];
    });
    const float mean = sum_of<32>(sum) / e;
    float square = 0;
    for_groups<N>(x, e, [&](float(&group)[N], int) {
        for (int i = 0; i < N; i++) {
            group[i] -= mean;
            square += group[i] * group[i];
        }
    });
    const float scale = 1 / sqrtf(sum_of<32>(square) / e + eps);
    for_groups<N>(x, e, [&](float(&group)[N], int column) {
        float w[N], b[N];
        load(w, weight + column);
        load(b, bias + column);
        for (int i = 0; i < N; i++) group[i] = group[i] * scale * w[i] + b[i];
        store(out + column, group);
    });
}

// Adds a row to the elements that a thread keeps.
template <int N, typename T> __device__ void add_row(Kept<N> &x, const T *row, int e) {
    for_groups<N>(x, e, [&](float(&group)[N], int column) {
        float y[N];
        load(y, row + column);
        for (int i = 0; i < N; i++) group[i] += y[i];
    });
}

// y may be null.
template <int N, typename T>
__device__ void add_layer_norm_row(const T *x, const T *y, const T *weight, const T *bias, T *out,
                                   int e, float eps) {
    Kept<N> sum = {};
    add_row<N>(sum, x, e);
    if (y) add_row<N>(sum, y, e);
    normalise<N>(sum, weight, bias, out, e, eps);
}

// y may be null. The block size must be a multiple of 32.
template <typename T>
__device__ void add_layer_norm(const T *x, const T *y, const T *weight, const T *bias, T *out,
                               int rows, int e, float eps) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    const size_t at = (size_t)row * e;
    const T *y_row = y ? y + at : nullptr;
    if (fit_groups_of_8(e, x, y, weight, bias, out))
        add_layer_norm_row<8>(x + at, y_row, weight, bias, out + at, e, eps);
    else
        add_layer_norm_row<2>(x + at, y_row, weight, bias, out + at, e, eps);
}

template <int N, typename T>
__device__ void embed_layer_norm_row(const T *word, const T *type, const T *position,
                                     const T *weight, const T *bias, T *out, int e, float eps) {
    Kept<N> sum = {};
    add_row<N>(sum, word, e);
    add_row<N>(sum, type, e);
    add_row<N>(sum, position, e);
    normalise<N>(sum, weight, bias, out, e, eps);
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
    T *to = out + (size_t)row * e;
    if (i_word >= table_rows.words || i_type >= table_rows.types ||
        i_position >= table_rows.positions) {
        for (int i = 2 * lane; i < e; i += 64) store2(to + i, NAN, NAN);
        return;
    }
    const T *word = words + (size_t)i_word * e, *type = types + (size_t)i_type * e,
            *position = positions + (size_t)i_position * e;
    if (fit_groups_of_8(e, words, types, positions, weight, bias, out))
        embed_layer_norm_row<8>(word, type, position, weight, bias, to, e, eps);
    else
        embed_layer_norm_row<2>(word, type, position, weight, bias, to, e, eps);
}

// One block per row of any even length. The row is read twice, the second time from a cache. y may
// be null.
template <int N, typename T>
__device__ void add_rms_norm_row(const T *x, const T *y, const float *weight, T *out, int e,
                                 float eps) {
    const auto load_sum = [&](float(&z)[N], int column) {
        load(z, x + column);
        if (!y) return;
        float other[N];
        load(other, y + column);
        for (int i = 0; i < N; i++) z[i] += other[i];
    };
    const int first = N * threadIdx.x, step = N * blockDim.x;
    float square = 0;
    for (int column = first; column < e; column += step) {
        float z[N];
        load_sum(z, column);
        for (int i = 0; i < N; i++) square += z[i] * z[i];
    }
    const float scale = 1 / sqrtf(sum_of_block(square) / e + eps);
    for (int column = first; column < e; column += step) {
        float z[N], w[N];
        load_sum(z, column);
        load(w, weight + column);
        for (int i = 0; i < N; i++) z[i] *= scale * w[i];
        store(out + column, z);
    }
}

// y may be null. The block size must be a multiple of 32.
template <typename T>
__device__ void add_rms_norm(const T *x, const T *y, const float *weight, T *out, int e,
                             float eps) {
    const size_t at = (size_t)blockIdx.x * e;
    const T *y_row = y ? y + at : nullptr;
    if (fit_groups_of_8(e, x, y, weight, out))
        add_rms_norm_row<8>(x + at, y_row, weight, out + at, e, eps);
    else
        add_rms_norm_row<2>(x + at, y_row, weight, out + at, e, eps);
}

#define KERNELS(name, T)                                                                           \
    extern "C" __global__ void add_layer_norm_##name(const T *x, const T *y, const T *weight,      \
                                                     const T *bias, T *out, int rows, int e,       \
                                                     float eps) {                                  \
        add_layer_norm(x, y, weight, bias, out, rows, e, eps);                                     \
    }                                                                                              \
    extern "C" __global__ void add_rms_norm_##name(const T *x, const T *y, const float *weight,    \
                                                   T *out, int e, float eps) {                     \
        add_rms_norm(x, y, weight, out, e, eps);                                                   \
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
