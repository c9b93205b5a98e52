// FlashAttention, softmax(q·kᵀ · scale + bias) · v, within each ragged sequence: Dao et al. 2022 and
// 2023, <https://arxiv.org/abs/2205.14135>, <https://arxiv.org/abs/2307.08691>.
//
// attention.cu, attention_band.cu and attention_bias.cu define the kernels. They are separate
// modules, so that the driver compiles only those that a model uses.
//
// For f16 and bf16, a thread block computes 64 or 128 queries of one sequence and head. It
// processes tiles of 64 keys with the tensor cores, 16 or 32 queries per warp; the scores stay in
// registers. For f32, a thread block computes 64 queries. It processes 32 keys at a time in f32
// arithmetic, 4 queries per group of 8 threads. The maximum starts at -FLT_MAX: with -INFINITY, a
// query whose scores for the first tile of keys are all -INFINITY would give NaN (∞ − ∞).
#pragma once
#include "elements.cuh"

#include <cfloat>

// src/lib.rs has the same QUERIES and THREADS.
const int QUERIES = 64, KEYS = 64, THREADS = 128;

// Elements of padding after each row in shared memory, so that eight rows are in different banks.
const int PAD = 8;

__device__ inline bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }

// Which keys of its sequence a query sees: all, or those in a band around the query. BIASED: a band,
// and the score of a key has a bias that depends on its distance from the query. The distance is
// the index of the key minus that of the query.
enum Kind { WHOLE, BAND, BIASED };

struct Positions {
    int first, last;   // the distances of the visible keys
    const float *bias; // the biases of the head; those of −∞ hide keys
    int columns;       // number of biases
    int zero;          // the column of distance 0

    // The bias of a distance, times log₂e. A finite bias stays finite.
    __device__ float operator[](int distance) const {
        const float x = bias[min(max(zero + distance, 0), columns - 1)];
        const float scaled = fminf(fmaxf(x * 1.44269504f, -FLT_MAX), FLT_MAX);
        return is_finite(x) ? scaled : x;
    }
};

// A range of keys.
struct Range {
    int from, to;
};

// A tile of keys or values in shared memory.
template <int D, typename T> using Rows = T[KEYS][D + PAD];

// The softmax of a warp's 16 · M queries over the keys so far: the weighted sum of the values, the
// maximum of a query's scores · scale · log₂e, and this thread's part of the sum of a query's
// weights. Of each 16 queries, a thread has queries lane / 4 and lane / 4 + 8; of each 8 columns of
// their context, columns 2 · (lane % 4) and 2 · (lane % 4) + 1.
template <int D, int M> struct Softmax {
    float context[M][D / 8][4], row_max[M][2], row_sum[M][2];
};

// Adds a tile of keys and values. If IS_PARTIAL, some keys of the tile are hidden: the queries of
// the warp see no key outside of `range`, and with a band, query row lane / 4 + 8 · r of the m-th 16
// queries sees only keys of `rows[m][r]`. Ranges count from the first key of the tile, and
// `distance` is that of the tile's first key from the warp's first query.
template <int D, int M, Kind KIND, bool IS_PARTIAL, typename T>
__device__ inline void add_tile(Softmax<D, M> &sums, const uint32_t (&queries)[M][D / 16][4],
                                const Rows<D, T> &keys, const Rows<D, T> &values, Range range,
                                const Range (&rows)[M][2], float scale_log2,
                                const Positions &positions, int distance) {
    const int lane = threadIdx.x % 32;

    // Scores of the m-th 16 queries have the biases of 16 · m columns before, and those of row
    // lane / 4 + 8 the biases of 8 columns before.
    const int SHIFTS = KIND == BIASED ? 2 * M - 1 : 0;
    float biases[KIND == BIASED ? KEYS / 8 + SHIFTS : 1][2];
    if (KIND == BIASED)
#pragma unroll
        for (int n = 0; n < KEYS / 8 + SHIFTS; n++)
            for (int i = 0; i < 2; i++)
                biases[n][i] =
                    positions[distance + 8 * (n - SHIFTS) + 2 * (lane % 4) + i - lane / 4];

    // 1. Scores. Of each 16 queries and 8 keys, a thread has the scores of two queries for two
    // neighbouring keys.
    float scores[M][KEYS / 8][4] = {};
    for (int n = 0; n < KEYS / 8; n++) {
        if (IS_PARTIAL && (8 * n >= range.to || 8 * n + 8 <= range.from)) continue;
        for (int s = 0; s < D / 16; s += 2) {
            uint32_t key[4];
            load_matrices(key, &keys[8 * n + lane % 8][16 * s + lane / 8 * 8]);
            for (int m = 0; m < M; m++) {
                mma(scores[m][n], queries[m][s], key[0], key[1], T());
                mma(scores[m][n], queries[m][s + 1], key[2], key[3], T());
            }
        }
    }

    // 2. Online softmax: rescale the sums so far to the new maximum.
#pragma unroll // else the arrays are in local memory
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < KEYS / 8; n++)
            for (int i = 0; i < 4; i++) {
                const int key = 8 * n + 2 * (lane % 4) + i % 2;
                const Range row = KIND == WHOLE ? range : rows[m][i / 2];
                bool visible = !IS_PARTIAL || (key >= row.from && key < row.to);
                float score = scores[m][n][i] * scale_log2;
                if (KIND == BIASED) {
                    const float bias = biases[n + SHIFTS - (2 * m + i / 2)][i % 2];
                    visible &= bias != -INFINITY;
                    score = fmaf(scores[m][n][i], scale_log2, bias);
                }
                scores[m][n][i] = visible ? score : -INFINITY;
            }
        for (int r = 0; r < 2; r++) {
            float new_max = sums.row_max[m][r];
            for (int n = 0; n < KEYS / 8; n++)
                new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
            new_max = max_of<4>(new_max);
            const float rescale = approximate_exp2(sums.row_max[m][r] - new_max);
            sums.row_max[m][r] = new_max;
            sums.row_sum[m][r] *= rescale;
            for (int n = 0; n < D / 8; n++) {
                sums.context[m][n][2 * r] *= rescale;
                sums.context[m][n][2 * r + 1] *= rescale;
            }
        }
        for (int n = 0; n < KEYS / 8; n++)
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = approximate_exp2(scores[m][n][i] - sums.row_max[m][i / 2]);
                sums.row_sum[m][i / 2] += scores[m][n][i];
            }
    }

    // 3. Add the weighted values. The registers of the scores already have the layout that `mma`
    // expects of `a`.
    for (int s = 0; s < KEYS / 16; s++) {
        if (IS_PARTIAL && (16 * s >= range.to || 16 * s + 16 <= range.from)) continue;
        uint32_t weights[M][4];
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = scores[m][2 * s + i / 2];
                weights[m][i] = pack_pair<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t value[4];
            load_matrices_transposed(value, &values[16 * s + lane % 16][8 * n + lane / 16 * 8]);
            for (int m = 0; m < M; m++) {
                mma(sums.context[m][n], weights[m], value[0], value[1], T());
                mma(sums.context[m][n + 1], weights[m], value[2], value[3], T());
            }
        }
    }
}

// The tensors of a head, and the strides from one token to the next, in elements.
template <typename T> struct Head {
    const T *q, *k, *v;
    T *out;
    int64_t q_stride, k_stride, v_stride, out_stride;
};

// Computes query `first + i` for each bit i that is set in the `rows` of any thread of the warp, key
// by key, and overwrites its output. The tensor cores multiply the value of a hidden key by a weight of 0, which
// gives NaN if the value is not finite; this function reads visible keys only. A query that sees no
// key gets zeros.
template <int D, typename T>
__device__ __noinline__ void attend_to_visible_keys(const Head<T> &head, uint32_t rows, int first,
                                                    Range sequence, Kind kind,
                                                    const Positions &positions, float scale_log2) {
    const int lane = threadIdx.x % 32, PARTS = D / 32;
    for (int mask = 16; mask > 0; mask /= 2) rows |= __shfl_xor_sync(0xffffffff, rows, mask);
    __syncwarp(); // the output of other threads has been written
    for (int query = first; rows != 0; query++, rows >>= 1) {
        if (rows % 2 == 0) continue;
        const int from = max(sequence.from, query + positions.first);
        const int to = min(sequence.to, query + positions.last + 1);
        float context[PARTS] = {}, row_max = -FLT_MAX, row_sum = 0;
        bool sees_key = false;
        for (int key = from; key < to; key++) {
            const float bias = kind == BIASED ? positions[key - query] : 0;
            if (bias == -INFINITY) continue;
            float product = 0;
            for (int i = 0; i < PARTS; i++)
                product = fmaf((float)head.q[query * head.q_stride + 32 * i + lane],
                               (float)head.k[key * head.k_stride + 32 * i + lane], product);
            const float score = fmaf(sum_of<32>(product), scale_log2, bias);
            const float new_max = fmaxf(row_max, score);
            const float rescale = exp2f(row_max - new_max), weight = exp2f(score - new_max);
            row_max = new_max;
            row_sum = fmaf(row_sum, rescale, weight);
            for (int i = 0; i < PARTS; i++)
                context[i] = fmaf(weight, (float)head.v[key * head.v_stride + 32 * i + lane],
                                  context[i] * rescale);
            sees_key = true;
        }
        for (int i = 0; i < PARTS; i++)
            head.out[query * head.out_stride + 32 * i + lane] = sees_key ? context[i] / row_sum : 0;
    }
}

// The keys that at least one of the queries `first..=last` sees.
__device__ inline Range visible_keys(Range sequence, int first, int last,
                                     const Positions &positions) {
    return {max(sequence.from, first + positions.first),
            min(sequence.to, last + positions.last + 1)};
}

// 64 · M queries per thread block. tiles: for each tile of 64 queries, the first token of its
// sequence, the end of its sequence, and the tile's first query. There is a thread block for each
// tile of queries and each head. If M is 2, the blocks of the second, fourth, … tile of a sequence
// return at once: the block of the preceding tile computes their queries too.
template <int D, int M, Kind KIND, typename T>
__device__ void attend(const Head<T> &head, const uint32_t *tiles, float scale,
                       const Positions &positions) {
    // While the warps compute with one tile, the next one is copied.
    alignas(16) __shared__ Rows<D, T> keys[2], values[2];

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const Range sequence = {(int)tile[0], (int)tile[1]};
    const int first = tile[2], end = sequence.to;
    if ((first - sequence.from) / QUERIES % M != 0) return;
    const int first_of_warp = first + threadIdx.x / 32 * 16 * M;
    const int last_of_warp = min(end, first_of_warp + 16 * M) - 1;
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    const int last = min(end, first + QUERIES * M) - 1;
    const Range all = KIND == WHOLE ? sequence : visible_keys(sequence, first, last, positions);
    const Range of_warp =
        KIND == WHOLE ? sequence : visible_keys(sequence, first_of_warp, last_of_warp, positions);

    const auto copy_tile = [&](int key0, int stage) {
        const int column = threadIdx.x % (D / 8) * 8;
        for (int row = threadIdx.x / (D / 8); row < KEYS; row += THREADS / (D / 8)) {
            const bool visible = key0 + row < all.to;
            const int token = visible ? key0 + row : all.from;
            const T *key = head.k + token * head.k_stride + column;
            const T *value = head.v + token * head.v_stride + column;
            copy_or_zero(&keys[stage][row][column], key, visible);
            copy_or_zero(&values[stage][row][column], value, visible);
        }
        commit_copies();
    };
    if (KIND == WHOLE || all.from < all.to) copy_tile(all.from, 0);

    uint32_t queries[M][D / 16][4];
    for (int m = 0; m < M; m++)
        for (int s = 0; s < D / 16; s++)
            for (int i = 0; i < 4; i++) {
                const int query = first_of_warp + 16 * m + lane / 4 + i % 2 * 8;
                const T *at = head.q + query * head.q_stride + 16 * s + pair + i / 2 * 8;
                queries[m][s][i] = query < end ? load_pair(at) : 0;
            }

    const float scale_log2 = scale * 1.44269504f;
    Softmax<D, M> sums = {};
    for (int m = 0; m < M; m++) sums.row_max[m][0] = sums.row_max[m][1] = -FLT_MAX;
    for (int key0 = all.from, stage = 0; key0 < all.to; key0 += KEYS, stage ^= 1) {
        const bool is_last = key0 + KEYS >= all.to;
        if (!is_last) copy_tile(key0 + KEYS, stage ^ 1);
        if (is_last)
            wait_for_copies<0>();
        else
            wait_for_copies<1>(); // all but the newest
        __syncthreads();
        const Range range = {KIND == WHOLE ? 0 : of_warp.from - key0, of_warp.to - key0};
        // Otherwise the warp has no queries, or they do not see a key of this tile.
        if (first_of_warp < end && (KIND == WHOLE || (range.from < KEYS && range.to > 0))) {
            bool is_partial = is_last;
            Range rows[M][2] = {};
            if (KIND != WHOLE) {
                is_partial |= last_of_warp + positions.first > key0 ||
                              first_of_warp + positions.last < key0 + KEYS - 1;
                for (int m = 0; m < M; m++)
                    for (int r = 0; r < 2; r++) {
                        const int query = first_of_warp + 16 * m + lane / 4 + 8 * r;
                        const Range row = visible_keys(sequence, query, query, positions);
                        rows[m][r] = {row.from - key0, row.to - key0};
                    }
            }
            const auto &k_tile = keys[stage], &v_tile = values[stage];
            const int distance = key0 - first_of_warp;
            if (is_partial)
                add_tile<D, M, KIND, true>(sums, queries, k_tile, v_tile, range, rows, scale_log2,
                                           positions, distance);
            else
                add_tile<D, M, KIND, false>(sums, queries, k_tile, v_tile, range, rows, scale_log2,
                                            positions, distance);
        }
        __syncthreads(); // all threads have finished with this tile
    }

    uint32_t not_finite = 0; // a bit for each query of the warp
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 2; r++) {
            const float sum = sum_of<4>(sums.row_sum[m][r]);
            const int row = 16 * m + lane / 4 + 8 * r, query = first_of_warp + row;
            if (query >= end) continue;
            T *to = head.out + query * head.out_stride + pair;
            for (int n = 0; n < D / 8; n++) {
                const float x = sums.context[m][n][2 * r] / sum;
                const float y = sums.context[m][n][2 * r + 1] / sum;
                if (KIND != WHOLE && !(is_finite(x) && is_finite(y)))
                    not_finite |= 1u << row;
                store2(to + 8 * n, x, y);
            }
        }
    if (KIND != WHOLE)
        attend_to_visible_keys<D>(head, not_finite, first_of_warp, sequence, KIND, positions,
                                  scale_log2);
}

__device__ inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// 64 queries per thread block; the second template parameter is 1.
template <int D, int, Kind KIND>
__device__ void attend(const Head<float> &head, const uint32_t *tiles, float scale,
                       const Positions &positions) {
    // LANES neighbouring threads compute ROWS queries. Each thread computes the scores of every
    // eighth key, then every eighth group of four columns of the context. Rows of keys are padded
    // by four elements, so that the eight threads read their keys from different banks.
    const int F32_KEYS = 32, ROWS = 4, LANES = 8, WIDTH = D + 4;
    alignas(16) __shared__ float queries[QUERIES][WIDTH];
    alignas(16) __shared__ float keys[F32_KEYS][WIDTH];
    alignas(16) __shared__ float values[F32_KEYS][D];
    alignas(16) __shared__ float weights[QUERIES][F32_KEYS + 4];

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const Range sequence = {(int)tile[0], (int)tile[1]};
    const int first = tile[2], end = sequence.to;
    const int lane = threadIdx.x % LANES, row0 = threadIdx.x / LANES * ROWS;
    const int last = min(end, first + QUERIES) - 1;
    const Range all = KIND == WHOLE ? sequence : visible_keys(sequence, first, last, positions);

    const float4 none = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < QUERIES * D / 4; i += THREADS) {
        const int query = i / (D / 4), column = i % (D / 4) * 4;
        *as_float4(&queries[query][column]) =
            first + query < end
                ? *as_float4(head.q + (first + query) * head.q_stride + column)
                : none;
    }

    const float scale_log2 = scale * 1.44269504f;
    float4 context[ROWS][D / 32] = {};
    float row_max[ROWS], row_sum[ROWS] = {};
    for (int i = 0; i < ROWS; i++) row_max[i] = -FLT_MAX;
    for (int key0 = all.from; key0 < all.to; key0 += F32_KEYS) {
        __syncthreads(); // all threads have finished with the previous keys
        for (int i = threadIdx.x; i < F32_KEYS * D / 4; i += THREADS) {
            const int key = i / (D / 4), column = i % (D / 4) * 4;
            const bool visible = key0 + key < all.to;
            *as_float4(&keys[key][column]) =
                visible ? *as_float4(head.k + (key0 + key) * head.k_stride + column) : none;
            *as_float4(&values[key][column]) =
                visible ? *as_float4(head.v + (key0 + key) * head.v_stride + column) : none;
        }
        __syncthreads();

        // 1. Scores.
        float scores[ROWS][F32_KEYS / LANES] = {};
        for (int column = 0; column < D; column += 4)
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < F32_KEYS / LANES; j++)
                    scores[i][j] = dot(*as_float4(&queries[row0 + i][column]),
                                       *as_float4(&keys[lane + LANES * j][column]), scores[i][j]);

        // 2. Online softmax: rescale the sums so far to the new maximum.
        for (int i = 0; i < ROWS; i++) {
            const int query = first + row0 + i;
            const Range row =
                KIND == WHOLE ? sequence : visible_keys(sequence, query, query, positions);
            float new_max = row_max[i];
            for (int j = 0; j < F32_KEYS / LANES; j++) {
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
            for (int j = 0; j < F32_KEYS / LANES; j++) {
                const float weight = exp2f(scores[i][j] - new_max);
                row_sum[i] += weight;
                weights[row0 + i][lane + LANES * j] = weight;
            }
        }
        __syncwarp(); // the threads that share queries are in one warp

        // 3. Add the weighted values.
        for (int key = 0; key < F32_KEYS; key++)
            for (int n = 0; n < D / 32; n++) {
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
        float *to = head.out + query * head.out_stride + 4 * lane;
        for (int n = 0; n < D / 32; n++) {
            const float4 x = context[i][n];
            const float4 y = {x.x / sum, x.y / sum, x.z / sum, x.w / sum};
            if (KIND != WHOLE && !(is_finite(y.x) && is_finite(y.y) && is_finite(y.z) && is_finite(y.w)))
                not_finite |= 1u << (threadIdx.x % 32 / LANES * ROWS + i);
            *as_float4(to + 32 * n) = y;
        }
    }
    if (KIND != WHOLE)
        attend_to_visible_keys<D>(head, not_finite, first + threadIdx.x / 32 * 16, sequence, KIND,
                                  positions, scale_log2);
}

// The kernels PREFIX_NAME_D_Q of Q = 64 · M queries per thread block.
#define KERNEL(prefix, kind, name, T, D, Q)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, Q == 64 ? 4 : 2)                         \
        prefix##_##name##_##D##_##Q(                                                               \
            const T *q, const T *k, const T *v, T *out, const uint32_t *tiles, int64_t q_head,     \
            int64_t q_token, int64_t k_head, int64_t k_token, int64_t v_head, int64_t v_token,     \
            int group, float scale, int first, int last, const float *bias, int columns,           \
            int zero) {                                                                            \
        const int64_t head = blockIdx.y, heads = gridDim.y;                                        \
        attend<D, Q / QUERIES, kind>(                                                              \
            Head<T>{q + head * q_head, k + head / group * k_head, v + head / group * v_head,       \
                    out + head * D, q_token, k_token, v_token, heads * D},                         \
            tiles, scale, Positions{first, last, bias + head * columns, columns, zero});           \
    }
#define KERNELS(prefix, kind)                                                                      \
    KERNEL(prefix, kind, f32, float, 32, 64)                                                       \
    KERNEL(prefix, kind, f32, float, 64, 64)                                                       \
    KERNEL(prefix, kind, f16, f16, 32, 64)                                                         \
    KERNEL(prefix, kind, f16, f16, 32, 128)                                                        \
    KERNEL(prefix, kind, f16, f16, 64, 64)                                                         \
    KERNEL(prefix, kind, f16, f16, 64, 128)                                                        \
    KERNEL(prefix, kind, bf16, bf16, 32, 64)                                                       \
    KERNEL(prefix, kind, bf16, bf16, 32, 128)                                                      \
    KERNEL(prefix, kind, bf16, bf16, 64, 64)                                                       \
    KERNEL(prefix, kind, bf16, bf16, 64, 128)
