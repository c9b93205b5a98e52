// FlashAttention, softmax(q·kᵀ · scale + bias) · v, within each ragged sequence: Dao et al. 2022 and
// 2023, <https://arxiv.org/abs/2205.14135>, <https://arxiv.org/abs/2307.08691>.
//
// attention.cu, attention_band.cu, attention_bias.cu and attention_relative.cu define the kernels.
// They are separate modules, so that the driver loads only those that a model uses.
//
// For f16 and bf16, a thread block computes 64 or 128 queries of one sequence and head. It
// processes tiles of 64 keys, or 32 of wide heads, with the tensor cores, 16 or 32 queries per warp;
// the scores stay in registers. For f32, a thread block computes 64 queries in f32 arithmetic, 4
// queries per group of 8 threads, with 32 or 16 keys at a time. The maximum starts at -FLT_MAX: with
// -INFINITY, a query whose scores for the first tile of keys are all -INFINITY would give NaN
// (∞ − ∞).
//
// The template parameter W is the width of a head in registers and shared memory: d, the width in
// memory, is a multiple of 8 of at most W, and the columns from d on are zeros.
#pragma once
#include "elements.cuh"

#include <cfloat>
#include <type_traits>

// src/lib.rs has the same QUERIES and THREADS.
const int QUERIES = 64, THREADS = 128;

// Keys per tile for f16 and bf16. Static shared memory has 48 KiB.
template <int W> const int KEYS = W <= 64 ? 64 : 32;

// Elements of padding after each row in shared memory, so that eight rows are in different banks.
const int PAD = 8;

__device__ inline bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }

// Which keys of its sequence a query sees: all, or those in a band around the query. BIASED: a band,
// and the score of a key has a bias that depends on its distance from the query. RELATIVE: a band,
// and the raw score has the terms of disentangled attention. The distance is the index of the key
// minus that of the query.
enum Kind { WHOLE, BAND, BIASED, RELATIVE };

struct Positions {
    int first, last;      // the distances of the visible keys
    int columns;          // number of biases, or of rows
    int zero;             // the column of distance 0
    const float *bias;    // the biases of the head; those of −∞ hide keys
    const uint32_t *rows; // the relative position of each distance

    __device__ int column(int distance) const {
        return min(max(zero + distance, 0), columns - 1);
    }
    // The bias of a distance, times log₂e. A finite bias stays finite.
    __device__ float operator[](int distance) const {
        const float x = bias[column(distance)];
        const float scaled = fminf(fmaxf(x * 1.44269504f, -FLT_MAX), FLT_MAX);
        return is_finite(x) ? scaled : x;
    }
};

// A range of tokens.
struct Range {
    int from, to;
};

// The projected relative positions of a head, which are multiplied by queries and by keys, and the
// strides from one to the next, in elements. Null omits a term.
template <typename T> struct Relative {
    const T *keys, *queries;
    int keys_stride, queries_stride;

    // The relative positions of a distance.
    __device__ const T *key(const Positions &positions, int distance) const {
        return keys + (int64_t)positions.rows[positions.column(distance)] * keys_stride;
    }
    __device__ const T *query(const Positions &positions, int distance) const {
        return queries + (int64_t)positions.rows[positions.column(distance)] * queries_stride;
    }
};
struct Nothing {};

// The tensors of a head, and the strides from one token to the next, in elements.
template <typename T, Kind KIND> struct Head {
    const T *q, *k, *v;
    T *out;
    int q_stride, k_stride, v_stride, out_stride;
    int d; // width
    std::conditional_t<KIND == RELATIVE, Relative<T>, Nothing> relative;
};

// A tile of up to 64 queries. Queries are counted from the first of the batch. A key has the number
// of the query at its position, which may be negative: `place_keys` moves the pointers accordingly.
struct Tile {
    int first;           // the first query
    Range queries, keys; // all of the sequence
    int64_t moved;       // the index of key 0

    __device__ Tile(const uint32_t *tiles) {
        const int *tile = (const int *)tiles + 6 * blockIdx.x;
        queries = {tile[0], tile[1]};
        first = tile[2];
        keys.from = queries.from - tile[3];
        keys.to = keys.from + tile[5] - tile[4];
        moved = tile[4] - keys.from;
    }
    template <typename H> __device__ void place_keys(H &head) const {
        head.k += moved * head.k_stride;
        head.v += moved * head.v_stride;
    }
};

// The keys that at least one of the queries `first..=last` sees.
__device__ inline Range visible_keys(Range keys, int first, int last, const Positions &positions) {
    return {max(keys.from, first + positions.first), min(keys.to, last + positions.last + 1)};
}

// Rows of keys or values in shared memory.
template <int N, int W, typename T> using Rows = T[N][W + PAD];

// Calls `copy(row, column)` for each row in `[from, to)` and each group of 8 columns of W. A thread
// has one group of columns.
template <int W, typename F> __device__ inline void for_groups_of_rows(int from, int to, F copy) {
    const int GROUPS = W / 8, STEP = THREADS / GROUPS;
    if (THREADS % GROUPS != 0 && threadIdx.x >= STEP * GROUPS) return;
    const int column = threadIdx.x % GROUPS * 8;
    for (int row = from + threadIdx.x / GROUPS; row < to; row += STEP) copy(row, column);
}

// Starts the copies of N rows of d elements from row `first` of a tensor on. Rows from `end` on become
// zeros.
template <int W, int N, typename T>
__device__ inline void copy_rows(Rows<N, W, T> &to, const T *from, int stride, int first, int end,
                                 int d) {
    for_groups_of_rows<W>(0, N, [&](int row, int column) {
        const bool is_visible = first + row < end && column < d;
        const T *at = from + (is_visible ? (int64_t)(first + row) * stride + column : 0);
        copy_or_zero(&to[row][column], at, is_visible);
    });
}

// The softmax of a warp's 16 · M queries over the keys so far: the weighted sum of the values, the
// maximum of a query's scores · scale · log₂e, and this thread's part of the sum of a query's
// weights. Of each 16 queries, a thread has queries lane / 4 and lane / 4 + 8; of each 8 columns of
// their context, columns 2 · (lane % 4) and 2 · (lane % 4) + 1.
template <int W, int M> struct Softmax {
    float context[M][W / 8][4] = {}, row_max[M][2], row_sum[M][2] = {};

    __device__ Softmax() {
        for (int m = 0; m < M; m++) row_max[m][0] = row_max[m][1] = -FLT_MAX;
    }
};

// The queries of a warp as `a` of `mma`.
template <int W, int M> using Queries = uint32_t[M][W / 16][4];

template <int W, int M, typename T, Kind KIND>
__device__ inline void load_queries(Queries<W, M> &queries, const Head<T, KIND> &head, int first,
                                    int end) {
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    for (int m = 0; m < M; m++)
        for (int s = 0; s < W / 16; s++)
            for (int i = 0; i < 4; i++) {
                const int query = first + 16 * m + lane / 4 + i % 2 * 8;
                const int column = 16 * s + i / 2 * 8;
                const T *at = head.q + (int64_t)query * head.q_stride + column + pair;
                queries[m][s][i] = query < end && column < head.d ? load_pair(at) : 0;
            }
}

// The scores of a warp's queries and 8 · G keys. Of each 16 queries and 8 keys, a thread has the
// scores of two queries for two neighbouring keys.
template <int M, int G> using Scores = float[M][G][4];

// The visible keys of a tile, counted from its first key.
struct Visible {
    Range warp;    // of all queries of the warp
    Range keys;    // the sequence's
    Range of_lane; // the band of the warp's query lane / 4

    // Of the warp's query lane / 4 + i.
    __device__ Range row(int i) const {
        return {max(keys.from, of_lane.from + i), min(keys.to, of_lane.to + i)};
    }
};

// Adds the products of the queries and the keys of a tile to the scores. If IS_PARTIAL, some keys of
// the tile are hidden.
template <int W, int M, bool IS_PARTIAL, int N, typename T>
__device__ inline void add_products(Scores<M, N / 8> &scores, const Queries<W, M> &queries,
                                    const Rows<N, W, T> &keys, const Visible &visible) {
    const int lane = threadIdx.x % 32;
#pragma unroll // else the scores are in local memory
    for (int n = 0; n < N / 8; n++) {
        if (IS_PARTIAL && (8 * n >= visible.warp.to || 8 * n + 8 <= visible.warp.from)) continue;
        for (int s = 0; s < W / 16; s += 2) {
            uint32_t key[4];
            load_matrices(key, &keys[8 * n + lane % 8][16 * s + lane / 8 * 8]);
            for (int m = 0; m < M; m++) {
                mma(scores[m][n], queries[m][s], key[0], key[1], T());
                mma(scores[m][n], queries[m][s + 1], key[2], key[3], T());
            }
        }
    }
}

// Adds the values of a tile, weighted by the softmax of the scores. `distance` is that of the tile's
// first key from the warp's first query.
template <int W, int M, Kind KIND, bool IS_PARTIAL, int N, typename T>
__device__ inline void add_values(Softmax<W, M> &sums, Scores<M, N / 8> &scores,
                                  const Rows<N, W, T> &values, const Visible &visible,
                                  float scale_log2, const Positions &positions, int distance) {
    const int lane = threadIdx.x % 32;

    // Scores of the m-th 16 queries have the biases of 16 · m columns before, and those of row
    // lane / 4 + 8 the biases of 8 columns before.
    const int SHIFTS = KIND == BIASED ? 2 * M - 1 : 0;
    float biases[KIND == BIASED ? N / 8 + SHIFTS : 1][2];
    if (KIND == BIASED)
#pragma unroll
        for (int n = 0; n < N / 8 + SHIFTS; n++)
            for (int i = 0; i < 2; i++)
                biases[n][i] =
                    positions[distance + 8 * (n - SHIFTS) + 2 * (lane % 4) + i - lane / 4];

    // 1. Online softmax: rescale the sums so far to the new maximum.
#pragma unroll // else the arrays are in local memory
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N / 8; n++)
            for (int i = 0; i < 4; i++) {
                const int key = 8 * n + 2 * (lane % 4) + i % 2;
                const Range row = KIND == WHOLE ? visible.warp : visible.row(16 * m + i / 2 * 8);
                bool is_visible = !IS_PARTIAL || (key >= row.from && key < row.to);
                float score = scores[m][n][i] * scale_log2;
                if (KIND == BIASED) {
                    const float bias = biases[n + SHIFTS - (2 * m + i / 2)][i % 2];
                    is_visible &= bias != -INFINITY;
                    score = fmaf(scores[m][n][i], scale_log2, bias);
                }
                scores[m][n][i] = is_visible ? score : -INFINITY;
            }
        for (int r = 0; r < 2; r++) {
            float new_max = sums.row_max[m][r];
            for (int n = 0; n < N / 8; n++)
                new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
            new_max = max_of<4>(new_max);
            const float rescale = approximate_exp2(sums.row_max[m][r] - new_max);
            sums.row_max[m][r] = new_max;
            sums.row_sum[m][r] *= rescale;
            for (int n = 0; n < W / 8; n++) {
                sums.context[m][n][2 * r] *= rescale;
                sums.context[m][n][2 * r + 1] *= rescale;
            }
        }
        for (int n = 0; n < N / 8; n++)
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = approximate_exp2(scores[m][n][i] - sums.row_max[m][i / 2]);
                sums.row_sum[m][i / 2] += scores[m][n][i];
            }
    }

    // 2. Add the weighted values. The registers of the scores already have the layout that `mma`
    // expects of `a`.
#pragma unroll // else the scores are in local memory
    for (int s = 0; s < N / 16; s++) {
        if (IS_PARTIAL && (16 * s >= visible.warp.to || 16 * s + 16 <= visible.warp.from)) continue;
        uint32_t weights[M][4];
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = scores[m][2 * s + i / 2];
                weights[m][i] = pack_pair<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        for (int n = 0; n < W / 8; n += 2) {
            uint32_t value[4];
            load_matrices_transposed(value, &values[16 * s + lane % 16][8 * n + lane / 16 * 8]);
            for (int m = 0; m < M; m++) {
                mma(sums.context[m][n], weights[m], value[0], value[1], T());
                mma(sums.context[m][n + 1], weights[m], value[2], value[3], T());
            }
        }
    }
}

template <int W, int M, Kind KIND, bool IS_PARTIAL, int N, typename T>
__device__ inline void add_tile(Softmax<W, M> &sums, const Queries<W, M> &queries,
                                const Rows<N, W, T> &keys, const Rows<N, W, T> &values,
                                const Visible &visible, float scale_log2,
                                const Positions &positions, int distance) {
    Scores<M, N / 8> scores = {};
    add_products<W, M, IS_PARTIAL>(scores, queries, keys, visible);
    add_values<W, M, KIND, IS_PARTIAL>(sums, scores, values, visible, scale_log2, positions,
                                       distance);
}

// The product of d elements of two rows, which the threads of a warp share. `at` is not below
// 32 · PARTS.
template <int PARTS, typename T>
__device__ inline float product_by_warp(const T *x, const T *y, int d) {
    float product = 0;
    for (int i = 0; i < PARTS; i++) {
        const int column = 32 * i + threadIdx.x % 32;
        if (column < d) product = fmaf((float)x[column], (float)y[column], product);
    }
    return sum_of<32>(product);
}

// Computes query `first + i` for each bit i that is set in the `rows` of any thread of the warp, key
// by key, and overwrites its output. The tensor cores multiply the value of a hidden key by a weight
// of 0, which gives NaN if the value is not finite; this function reads visible keys only. A query
// that sees no key gets zeros.
template <int W, typename T, Kind KIND>
__device__ __noinline__ void attend_to_visible_keys(const Head<T, KIND> &head, uint32_t rows,
                                                    int first, Range keys,
                                                    const Positions &positions, float scale_log2) {
    const int lane = threadIdx.x % 32, PARTS = W / 32;
    for (int mask = 16; mask > 0; mask /= 2) rows |= __shfl_xor_sync(0xffffffff, rows, mask);
    __syncwarp(); // the output of other threads has been written
    for (int query = first; rows != 0; query++, rows >>= 1) {
        if (rows % 2 == 0) continue;
        const Range range = visible_keys(keys, query, query, positions);
        float context[PARTS] = {}, row_max = -FLT_MAX, row_sum = 0;
        bool sees_key = false;
        for (int key = range.from; key < range.to; key++) {
            const int distance = key - query;
            const float bias = KIND == BIASED ? positions[distance] : 0;
            if (bias == -INFINITY) continue;
            const T *q = head.q + (int64_t)query * head.q_stride;
            const T *k = head.k + (int64_t)key * head.k_stride;
            const T *v = head.v + (int64_t)key * head.v_stride;
            float product = product_by_warp<PARTS>(q, k, head.d);
            if constexpr (KIND == RELATIVE) {
                const Relative<T> &relative = head.relative;
                if (relative.keys)
                    product += product_by_warp<PARTS>(q, relative.key(positions, distance), head.d);
                if (relative.queries)
                    product += product_by_warp<PARTS>(k, relative.query(positions, distance), head.d);
            }
            const float score = fmaf(product, scale_log2, bias);
            const float new_max = fmaxf(row_max, score);
            const float rescale = exp2f(row_max - new_max), weight = exp2f(score - new_max);
            row_max = new_max;
            row_sum = fmaf(row_sum, rescale, weight);
            for (int i = 0; i < PARTS; i++)
                if (32 * i + lane < head.d)
                    context[i] = fmaf(weight, (float)v[32 * i + lane], context[i] * rescale);
            sees_key = true;
        }
        T *out = head.out + (int64_t)query * head.out_stride;
        for (int i = 0; i < PARTS; i++)
            if (32 * i + lane < head.d) out[32 * i + lane] = sees_key ? context[i] / row_sum : 0;
    }
}

// Divides by the sums of the weights, and stores the context of the warp's queries.
template <int W, int M, typename T, Kind KIND>
__device__ inline void store_context(const Softmax<W, M> &sums, const Head<T, KIND> &head,
                                     const Tile &tile, int first_of_warp,
                                     const Positions &positions, float scale_log2) {
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    uint32_t not_finite = 0; // a bit for each query of the warp
#pragma unroll // else the sums are in local memory
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = sum_of<4>(sums.row_sum[m][r]);
            const int row = 16 * m + lane / 4 + 8 * r, query = first_of_warp + row;
            if (query >= tile.queries.to) continue;
            T *to = head.out + (int64_t)query * head.out_stride + pair;
#pragma unroll
            for (int n = 0; n < W / 8; n++) {
                if (8 * n >= head.d) continue;
                const float x = sums.context[m][n][2 * r] / sum;
                const float y = sums.context[m][n][2 * r + 1] / sum;
                if (KIND != WHOLE && !(is_finite(x) && is_finite(y))) not_finite |= 1u << row;
                store2(to + 8 * n, x, y);
            }
        }
    if (KIND != WHOLE)
        attend_to_visible_keys<W>(head, not_finite, first_of_warp, tile.keys, positions,
                                  scale_log2);
}

// The visible keys of the tile of N keys that starts at `key0`, for the warp's queries
// `first..=last`. Sets `is_partial` if some keys of the tile are hidden.
template <Kind KIND, int N>
__device__ inline Visible visible_in_tile(Range keys, Range of_warp, int first, int last, int key0,
                                          const Positions &positions, bool &is_partial) {
    if (KIND == WHOLE) return {{0, of_warp.to - key0}};
    is_partial |= last + positions.first > key0 || first + positions.last < key0 + N - 1;
    const int query = first + threadIdx.x % 32 / 4 - key0;
    return {{of_warp.from - key0, of_warp.to - key0},
            {keys.from - key0, keys.to - key0},
            {query + positions.first, query + positions.last + 1}};
}

// 64 · M queries per thread block. tiles: for each tile of 64 queries, the start and the end of the
// queries of its sequence, the tile's first query, the position of the sequence's first query, and
// the start and the end of its keys. There is a thread block for each tile of queries and each head.
// If M is 2, the blocks of the second, fourth, … tile of a sequence return at once: the block of the
// preceding tile computes their queries too.
template <int W, int M, Kind KIND, typename T>
__device__ void attend(Head<T, KIND> head, const uint32_t *tiles, float scale,
                       const Positions &positions) {
    // While the warps compute with one tile, the next one is copied.
    const int N = KEYS<W>;
    alignas(16) __shared__ Rows<N, W, T> keys[2], values[2];

    const Tile tile(tiles);
    tile.place_keys(head);
    const int first = tile.first, end = tile.queries.to;
    if ((first - tile.queries.from) / QUERIES % M != 0) return;
    const int first_of_warp = first + threadIdx.x / 32 * 16 * M;
    const int last_of_warp = min(end, first_of_warp + 16 * M) - 1;
    const int last = min(end, first + QUERIES * M) - 1;
    const Range all = KIND == WHOLE ? tile.keys : visible_keys(tile.keys, first, last, positions);
    const Range of_warp =
        KIND == WHOLE ? tile.keys
                      : visible_keys(tile.keys, first_of_warp, last_of_warp, positions);

    const auto copy_tile = [&](int key0, int stage) {
        copy_rows<W>(keys[stage], head.k, head.k_stride, key0, all.to, head.d);
        copy_rows<W>(values[stage], head.v, head.v_stride, key0, all.to, head.d);
        commit_copies();
    };
    if (KIND == WHOLE || all.from < all.to) copy_tile(all.from, 0);

    Queries<W, M> queries;
    load_queries<W, M>(queries, head, first_of_warp, end);

    const float scale_log2 = scale * 1.44269504f;
    Softmax<W, M> sums;
    for (int key0 = all.from, stage = 0; key0 < all.to; key0 += N, stage ^= 1) {
        const bool is_last = key0 + N >= all.to;
        if (!is_last) copy_tile(key0 + N, stage ^ 1);
        if (is_last)
            wait_for_copies<0>();
        else
            wait_for_copies<1>(); // all but the newest
        __syncthreads();
        // Otherwise the warp has no queries, or they do not see a key of this tile.
        if (first_of_warp < end &&
            (KIND == WHOLE || (of_warp.from < key0 + N && of_warp.to > key0))) {
            bool is_partial = is_last;
            const auto visible = visible_in_tile<KIND, N>(
                tile.keys, of_warp, first_of_warp, last_of_warp, key0, positions, is_partial);
            const int distance = key0 - first_of_warp;
            if (is_partial)
                add_tile<W, M, KIND, true>(sums, queries, keys[stage], values[stage], visible,
                                           scale_log2, positions, distance);
            else
                add_tile<W, M, KIND, false>(sums, queries, keys[stage], values[stage], visible,
                                            scale_log2, positions, distance);
        }
        __syncthreads(); // all threads have finished with this tile
    }
    store_context<W, M>(sums, head, tile, first_of_warp, positions, scale_log2);
}

__device__ inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// 64 queries per thread block; the second template parameter is 1.
template <int W, int, Kind KIND>
__device__ void attend(Head<float, KIND> head, const uint32_t *tiles, float scale,
                       const Positions &positions) {
    // LANES neighbouring threads compute ROWS queries. Each thread computes the scores of every
    // eighth key, then every eighth group of four columns of the context. Rows of keys are padded
    // by four elements, so that the eight threads read their keys from different banks. Wide heads
    // have room for either keys or values.
    const bool IS_WIDE = W > 64;
    const int N = IS_WIDE ? 16 : 32, ROWS = 4, LANES = 8, WIDTH = W + 4;
    alignas(16) __shared__ float queries[QUERIES][WIDTH];
    alignas(16) __shared__ float keys[N][WIDTH];
    alignas(16) __shared__ float narrow_values[IS_WIDE ? 1 : N][WIDTH];
    alignas(16) __shared__ float weights[QUERIES][N + 4];
    float(*values)[WIDTH] = IS_WIDE ? keys : narrow_values;

    const Tile tile(tiles);
    tile.place_keys(head);
    const int first = tile.first, end = tile.queries.to, d = head.d;
    const int lane = threadIdx.x % LANES, row0 = threadIdx.x / LANES * ROWS;
    const int last = min(end, first + QUERIES) - 1;
    const Range all = KIND == WHOLE ? tile.keys : visible_keys(tile.keys, first, last, positions);

    const auto copy = [&](float(*to)[WIDTH], int rows, const float *from, int stride, int row,
                          int end_row) {
        const float4 none = {0, 0, 0, 0};
        for (int i = threadIdx.x; i < rows * (W / 4); i += THREADS) {
            const int at = row + i / (W / 4), column = i % (W / 4) * 4;
            *as_float4(&to[i / (W / 4)][column]) =
                at < end_row && column < d ? *as_float4(from + (int64_t)at * stride + column) : none;
        }
    };
    copy(queries, QUERIES, head.q, head.q_stride, first, end);

    const float scale_log2 = scale * 1.44269504f;
    float4 context[ROWS][W / 32] = {};
    float row_max[ROWS], row_sum[ROWS] = {};
    for (int i = 0; i < ROWS; i++) row_max[i] = -FLT_MAX;
    for (int key0 = all.from; key0 < all.to; key0 += N) {
        __syncthreads(); // all threads have finished with the previous keys
        copy(keys, N, head.k, head.k_stride, key0, all.to);
        if (!IS_WIDE) copy(values, N, head.v, head.v_stride, key0, all.to);
        __syncthreads();

        // 1. Scores.
        float scores[ROWS][N / LANES] = {};
        for (int column = 0; column < W; column += 4)
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < N / LANES; j++)
                    scores[i][j] = dot(*as_float4(&queries[row0 + i][column]),
                                       *as_float4(&keys[lane + LANES * j][column]), scores[i][j]);
        if constexpr (KIND == RELATIVE)
#pragma unroll // else the scores are in local memory
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < N / LANES; j++) {
                    const int key = lane + LANES * j, distance = key0 + key - (first + row0 + i);
                    const auto add = [&](const float *x, const float *y) {
                        for (int column = 0; column < d; column += 4)
                            scores[i][j] =
                                dot(*as_float4(x + column), *as_float4(y + column), scores[i][j]);
                    };
                    if (head.relative.keys)
                        add(queries[row0 + i], head.relative.key(positions, distance));
                    if (head.relative.queries)
                        add(keys[key], head.relative.query(positions, distance));
                }

        // 2. Online softmax: rescale the sums so far to the new maximum.
        for (int i = 0; i < ROWS; i++) {
            const int query = first + row0 + i;
            const Range row =
                KIND == WHOLE ? tile.keys : visible_keys(tile.keys, query, query, positions);
            float new_max = row_max[i];
            for (int j = 0; j < N / LANES; j++) {
                const int key = key0 + lane + LANES * j;
                bool visible = key < row.to && (KIND == WHOLE || key >= row.from);
                float score = scores[i][j] * scale_log2;
                if (KIND == BIASED) {
                    const float bias = positions[key - query];
                    visible &= bias != -INFINITY;
                    score = fmaf(scores[i][j], scale_log2, bias);
                }
                scores[i][j] = visible ? score : -INFINITY;
                new_max = fmaxf(new_max, scores[i][j]);
            }
            new_max = max_of<LANES>(new_max);
            const float rescale = exp2f(row_max[i] - new_max);
            row_max[i] = new_max;
            row_sum[i] *= rescale;
            for (float4 &x : context[i])
                x = {x.x * rescale, x.y * rescale, x.z * rescale, x.w * rescale};
            for (int j = 0; j < N / LANES; j++) {
                const float weight = exp2f(scores[i][j] - new_max);
                row_sum[i] += weight;
                weights[row0 + i][lane + LANES * j] = weight;
            }
        }
        if (IS_WIDE) {
            __syncthreads(); // all threads have finished with the keys
            copy(values, N, head.v, head.v_stride, key0, all.to);
            __syncthreads();
        } else
            __syncwarp(); // the threads that share queries are in one warp

        // 3. Add the weighted values.
        for (int key = 0; key < N; key++)
            for (int n = 0; n < W / 32; n++) {
                const float4 value = *as_float4(&values[key][32 * n + 4 * lane]);
                for (int i = 0; i < ROWS; i++) {
                    const float weight = weights[row0 + i][key];
                    float4 &x = context[i][n];
                    x = {fmaf(weight, value.x, x.x), fmaf(weight, value.y, x.y),
                         fmaf(weight, value.z, x.z), fmaf(weight, value.w, x.w)};
                }
            }
    }

    uint32_t not_finite = 0; // a bit for each query of the warp
    for (int i = 0; i < ROWS; i++) {
        const float sum = sum_of<LANES>(row_sum[i]);
        const int query = first + row0 + i;
        if (query >= end) continue;
        float *to = head.out + (int64_t)query * head.out_stride;
        for (int n = 0; n < W / 32; n++) {
            const int column = 32 * n + 4 * lane;
            if (column >= d) continue;
            const float4 x = context[i][n];
            const float4 y = {x.x / sum, x.y / sum, x.z / sum, x.w / sum};
            const bool all_finite =
                is_finite(y.x) && is_finite(y.y) && is_finite(y.z) && is_finite(y.w);
            if (KIND != WHOLE && !all_finite)
                not_finite |= 1u << (threadIdx.x % 32 / LANES * ROWS + i);
            *as_float4(to + column) = y;
        }
    }
    if (KIND != WHOLE)
        attend_to_visible_keys<W>(head, not_finite, first + threadIdx.x / 32 * 16, tile.keys,
                                  positions, scale_log2);
}

// Thread blocks per multiprocessor that the registers must suffice for.
constexpr int min_blocks(Kind kind, int w, int queries) {
    return queries == 128 || w > 64 ? 2 : w == 64 || kind == BIASED ? 3 : 4;
}

// The kernels PREFIX_NAME_W_Q of Q = 64 · M queries per thread block.
#define KERNEL(prefix, kind, name, T, W, Q)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, min_blocks(kind, W, Q))                  \
        prefix##_##name##_##W##_##Q(                                                               \
            const T *q, const T *k, const T *v, T *out, const uint32_t *tiles, int64_t q_head,      \
            int q_token, int64_t k_head, int k_token, int64_t v_head, int v_token, \
            int group, int d, float scale, int first, int last,                   \
            const float *bias, int columns, int zero) {                                            \
        const int64_t head = blockIdx.y, heads = gridDim.y;                                        \
        attend<W, Q / QUERIES, kind>(                                                              \
            Head<T, kind>{q + head * q_head, k + head / group * k_head, v + head / group * v_head,       \
                    out + head * d, q_token, k_token, v_token, (int)heads * d, d},                      \
            tiles, scale,                                                                          \
            Positions{first, last, columns, zero, bias + head * columns});                         \
    }
#define KERNELS_OF_16_BITS(prefix, kind, name)                                                     \
    KERNEL(prefix, kind, name, name, 32, 64)                                                       \
    KERNEL(prefix, kind, name, name, 32, 128)                                                      \
    KERNEL(prefix, kind, name, name, 64, 64)                                                       \
    KERNEL(prefix, kind, name, name, 64, 128)                                                      \
    KERNEL(prefix, kind, name, name, 96, 64)                                                       \
    KERNEL(prefix, kind, name, name, 128, 64)
#define KERNELS(prefix, kind)                                                                      \
    KERNEL(prefix, kind, f32, float, 32, 64)                                                       \
    KERNEL(prefix, kind, f32, float, 64, 64)                                                       \
    KERNEL(prefix, kind, f32, float, 96, 64)                                                       \
    KERNEL(prefix, kind, f32, float, 128, 64)                                                      \
    KERNELS_OF_16_BITS(prefix, kind, f16)                                                          \
    KERNELS_OF_16_BITS(prefix, kind, bf16)
