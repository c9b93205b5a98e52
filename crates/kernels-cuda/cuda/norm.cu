// LayerNorm(x + y) and LayerNorm(word + token type + position): (x − mean) / √(var + ε) · w + b.
// The variance is the mean square of the centred values. Rows of up to MAX_ROW elements: one warp per
// row; the row is read once and kept in registers. Longer rows, the kernels ..._wide_...: one block per
// row, which reads it three times, the second and third time from a cache. RMSNorm(x + y):
// x / √(mean(x²) + ε) · w. The template parameter N is the number of elements per load: 8 if the row
// length is a multiple of 8 and the addresses are multiples of 16 bytes, otherwise 2.
#include "elements.cuh"

// Maximum length of a row that a warp normalises, as in src/lib.rs. The length of every row must be
// even.
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

// Normalises the sum of rows, of which y and z may be null. Of wide rows, all threads of the block call
// this function.
template <int N, bool IS_WIDE, typename T>
__device__ void normalise_sum(const T *x, const T *y, const T *z, const T *weight, const T *bias,
                              T *out, int e, float eps) {
    if (!IS_WIDE) {
        Kept<N> sum = {};
        add_row<N>(sum, x, e);
        if (y) add_row<N>(sum, y, e);
        if (z) add_row<N>(sum, z, e);
        normalise<N>(sum, weight, bias, out, e, eps);
        return;
    }
    // Calls `with(sums, column)` for each group of this thread.
    const auto for_sums = [&](auto with) {
        for (int column = N * threadIdx.x; column < e; column += N * blockDim.x) {
            float sum[N] = {};
            for (const T *row : {x, y, z}) {
                if (!row) continue;
                float part[N];
                load(part, row + column);
                for (int i = 0; i < N; i++) sum[i] += part[i];
            }
            with(sum, column);
        }
    };
    float total = 0, square = 0;
    for_sums([&](float(&sum)[N], int) {
        for (float value : sum) total += value;
    });
    const float mean = sum_of_block<0>(total) / e;
    for_sums([&](float(&sum)[N], int) {
        for (float value : sum) square += (value - mean) * (value - mean);
    });
    const float scale = 1 / sqrtf(sum_of_block<1>(square) / e + eps);
    for_sums([&](float(&sum)[N], int column) {
        float w[N], b[N];
        load(w, weight + column);
        load(b, bias + column);
        for (int i = 0; i < N; i++) sum[i] = (sum[i] - mean) * scale * w[i] + b[i];
        store(out + column, sum);
    });
}

// The row of this thread.
template <bool IS_WIDE> __device__ inline int own_row() {
    return IS_WIDE ? blockIdx.x : (blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

// y may be null. The block size must be a multiple of 32.
template <bool IS_WIDE, typename T>
__device__ void add_layer_norm(const T *x, const T *y, const T *weight, const T *bias, T *out,
                               int rows, int e, float eps) {
    const int row = own_row<IS_WIDE>();
    if (row >= rows) return;
    const size_t at = (size_t)row * e;
    const T *y_row = y ? y + at : nullptr, *none = nullptr;
    if (fit_groups_of_8(e, x, y, weight, bias, out))
        normalise_sum<8, IS_WIDE>(x + at, y_row, none, weight, bias, out + at, e, eps);
    else
        normalise_sum<2, IS_WIDE>(x + at, y_row, none, weight, bias, out + at, e, eps);
}

// A table of embeddings and its ids. `table` may be null: then there is no lookup.
template <typename T> struct Lookup {
    const uint32_t *ids;
    const T *table;
    uint32_t rows;

    __device__ bool is_out_of_range(int token) const { return table && ids[token] >= rows; }
    __device__ const T *row(int token, int e) const {
        return table ? table + (size_t)ids[token] * e : nullptr;
    }
};

// The output row of a token is NaN if one of its ids is not below its table's number of rows.
template <bool IS_WIDE, typename T>
__device__ void embed_layer_norm(const Lookup<T> &words, const Lookup<T> &types,
                                 const Lookup<T> &positions, const T *weight, const T *bias, T *out,
                                 int rows, int e, float eps) {
    const int token = own_row<IS_WIDE>();
    if (token >= rows) return;
    T *to = out + (size_t)token * e;
    if (words.is_out_of_range(token) || types.is_out_of_range(token) ||
        positions.is_out_of_range(token)) {
        const int threads = IS_WIDE ? blockDim.x : 32;
        for (int i = 2 * (threadIdx.x % threads); i < e; i += 2 * threads) store2(to + i, NAN, NAN);
        return;
    }
    const T *word = words.row(token, e), *type = types.row(token, e),
            *position = positions.row(token, e);
    if (fit_groups_of_8(e, words.table, types.table, positions.table, weight, bias, out))
        normalise_sum<8, IS_WIDE>(word, type, position, weight, bias, to, e, eps);
    else
        normalise_sum<2, IS_WIDE>(word, type, position, weight, bias, to, e, eps);
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

#define LAYER_NORM_KERNELS(name, T, IS_WIDE)                                                        \
    extern "C" __global__ void add_layer_norm_##name(const T *x, const T *y, const T *weight,      \
                                                     const T *bias, T *out, int rows, int e,       \
                                                     float eps) {                                  \
        add_layer_norm<IS_WIDE>(x, y, weight, bias, out, rows, e, eps);                            \
    }                                                                                              \
    extern "C" __global__ void embed_layer_norm_##name(                                            \
        const uint32_t *word_ids, const uint32_t *type_ids, const uint32_t *position_ids,          \
        const T *words, const T *types, const T *positions, const T *weight, const T *bias,        \
        T *out, int rows, int e, float eps, uint32_t n_words, uint32_t n_types,                    \
        uint32_t n_positions) {                                                                    \
        embed_layer_norm<IS_WIDE>(                                                                 \
            Lookup<T>{word_ids, words, n_words}, Lookup<T>{type_ids, types, n_types},              \
            Lookup<T>{position_ids, positions, n_positions}, weight, bias, out, rows, e, eps);     \
    }
#define KERNELS(name, T)                                                                           \
    LAYER_NORM_KERNELS(name, T, false)                                                             \
    LAYER_NORM_KERNELS(wide_##name, T, true)                                                       \
    extern "C" __global__ void add_rms_norm_##name(const T *x, const T *y, const float *weight,    \
                                                   T *out, int e, float eps) {                     \
        add_rms_norm(x, y, weight, out, e, eps);                                                   \
    }
FOR_ALL(KERNELS)
