// FlashAttention, softmax(q·kᵀ · scale) · v, within each packed sequence: Dao et al. 2022 and 2023,
// <https://arxiv.org/abs/2205.14135>, <https://arxiv.org/abs/2307.08691>.
//
// For f16 and bf16, a thread block computes 64 or 128 queries of one sequence and head. It
// processes tiles of 64 keys with the tensor cores, 16 or 32 queries per warp; the scores stay in
// registers. For f32, a thread block computes 64 queries. It processes 32 keys at a time in f32
// arithmetic, 4 queries per group of 8 threads. The maximum starts at -FLT_MAX: with -INFINITY, a
// query whose scores for the first tile of keys are all -INFINITY would give NaN (∞ − ∞).
#include "elements.cuh"

#include <cfloat>

// src/lib.rs has the same QUERIES and THREADS.
const int QUERIES = 64, KEYS = 64, THREADS = 128;

// Elements of padding after each row in shared memory, so that eight rows are in different banks.
const int PAD = 8;

// Strides in elements.
struct Strides {
    int64_t head, token;
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

// Adds a tile of keys and values. If IS_LAST, only the first n_keys are visible.
template <int D, int M, bool IS_LAST, typename T>
__device__ inline void add_tile(Softmax<D, M> &sums, const uint32_t (&queries)[M][D / 16][4],
                                const Rows<D, T> &keys, const Rows<D, T> &values, int n_keys,
                                float scale_log2) {
    const int lane = threadIdx.x % 32;

    // 1. Scores. Of each 16 queries and 8 keys, a thread has the scores of two queries for two
    // neighbouring keys.
    float scores[M][KEYS / 8][4] = {};
    for (int n = 0; n < KEYS / 8; n++) {
        if (IS_LAST && 8 * n >= n_keys) continue;
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
                const bool visible = !IS_LAST || 8 * n + 2 * (lane % 4) + i % 2 < n_keys;
                scores[m][n][i] = visible ? scores[m][n][i] * scale_log2 : -INFINITY;
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
        if (IS_LAST && 16 * s >= n_keys) continue;
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

// 64 · M queries per thread block. tiles: for each tile of 64 queries, the first token of its
// sequence, the end of its sequence, and the tile's first query. There is a thread block for each
// tile of queries and each head. If M is 2, the blocks of the second, fourth, … tile of a sequence
// return at once: the block of the preceding tile computes their queries too. group: H / G, the
// number of heads per key-value head.
template <int D, int M, typename T>
__device__ void attend(const T *q, const T *k, const T *v, T *out, const uint32_t *tiles,
                       Strides q_stride, Strides k_stride, Strides v_stride, int group,
                       float scale) {
    // While the warps compute with one tile, the next one is copied.
    alignas(16) __shared__ Rows<D, T> keys[2], values[2];

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const int begin = tile[0], end = tile[1];
    if ((tile[2] - begin) / QUERIES % M != 0) return;
    const int first_of_warp = tile[2] + threadIdx.x / 32 * 16 * M;
    const int head = blockIdx.y, heads = gridDim.y;
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    q += head * q_stride.head;
    k += head / group * k_stride.head;
    v += head / group * v_stride.head;

    const auto copy_tile = [&](int key0, int stage) {
        const int column = threadIdx.x % (D / 8) * 8;
        for (int row = threadIdx.x / (D / 8); row < KEYS; row += THREADS / (D / 8)) {
            const bool visible = key0 + row < end;
            const int token = visible ? key0 + row : begin;
            copy_or_zero(&keys[stage][row][column], k + token * k_stride.token + column, visible);
            copy_or_zero(&values[stage][row][column], v + token * v_stride.token + column, visible);
        }
        commit_copies();
    };
    copy_tile(begin, 0);

    uint32_t queries[M][D / 16][4];
    for (int m = 0; m < M; m++)
        for (int s = 0; s < D / 16; s++)
            for (int i = 0; i < 4; i++) {
                const int query = first_of_warp + 16 * m + lane / 4 + i % 2 * 8;
                const T *at = q + query * q_stride.token + 16 * s + pair + i / 2 * 8;
                queries[m][s][i] = query < end ? load_pair(at) : 0;
            }

    const float scale_log2 = scale * 1.44269504f;
    Softmax<D, M> sums = {};
    for (int m = 0; m < M; m++) sums.row_max[m][0] = sums.row_max[m][1] = -FLT_MAX;
    for (int key0 = begin, stage = 0; key0 < end; key0 += KEYS, stage ^= 1) {
        const bool is_last = key0 + KEYS >= end;
        if (!is_last) copy_tile(key0 + KEYS, stage ^ 1);
        if (is_last)
            wait_for_copies<0>();
        else
            wait_for_copies<1>(); // all but the newest
        __syncthreads();
        if (first_of_warp < end) { // otherwise the warp has no queries
            const auto &k_tile = keys[stage], &v_tile = values[stage];
            if (is_last)
                add_tile<D, M, true>(sums, queries, k_tile, v_tile, end - key0, scale_log2);
            else
                add_tile<D, M, false>(sums, queries, k_tile, v_tile, KEYS, scale_log2);
        }
        __syncthreads(); // all threads have finished with this tile
    }

    for (int m = 0; m < M; m++)
        for (int r = 0; r < 2; r++) {
            const float sum = sum_of<4>(sums.row_sum[m][r]);
            const int query = first_of_warp + 16 * m + lane / 4 + 8 * r;
            if (query >= end) continue;
            T *to = out + ((int64_t)query * heads + head) * D + pair;
            for (int n = 0; n < D / 8; n++) {
                const float(&context)[4] = sums.context[m][n];
                store2(to + 8 * n, context[2 * r] / sum, context[2 * r + 1] / sum);
            }
        }
}

__device__ inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// 64 queries per thread block; the second template parameter is 1.
template <int D, int>
__device__ void attend(const float *q, const float *k, const float *v, float *out,
                       const uint32_t *tiles, Strides q_stride, Strides k_stride,
                       Strides v_stride, int group, float scale) {
    // LANES neighbouring threads compute ROWS queries. Each thread computes the scores of every
    // eighth key, then every eighth group of four columns of the context. Rows of keys are padded
    // by four elements, so that the eight threads read their keys from different banks.
    const int F32_KEYS = 32, ROWS = 4, LANES = 8, WIDTH = D + 4;
    alignas(16) __shared__ float queries[QUERIES][WIDTH];
    alignas(16) __shared__ float keys[F32_KEYS][WIDTH];
    alignas(16) __shared__ float values[F32_KEYS][D];
    alignas(16) __shared__ float weights[QUERIES][F32_KEYS + 4];

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const int begin = tile[0], end = tile[1], first = tile[2];
    const int head = blockIdx.y, heads = gridDim.y;
    const int lane = threadIdx.x % LANES, row0 = threadIdx.x / LANES * ROWS;
    q += head * q_stride.head;
    k += head / group * k_stride.head;
    v += head / group * v_stride.head;

    const float4 none = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < QUERIES * D / 4; i += THREADS) {
        const int query = i / (D / 4), column = i % (D / 4) * 4;
        *as_float4(&queries[query][column]) =
            first + query < end ? *as_float4(q + (first + query) * q_stride.token + column) : none;
    }

    const float scale_log2 = scale * 1.44269504f;
    float4 context[ROWS][D / 32] = {};
    float row_max[ROWS], row_sum[ROWS] = {};
    for (int i = 0; i < ROWS; i++) row_max[i] = -FLT_MAX;
    for (int key0 = begin; key0 < end; key0 += F32_KEYS) {
        __syncthreads(); // all threads have finished with the previous keys
        for (int i = threadIdx.x; i < F32_KEYS * D / 4; i += THREADS) {
            const int key = i / (D / 4), column = i % (D / 4) * 4;
            const bool visible = key0 + key < end;
            *as_float4(&keys[key][column]) =
                visible ? *as_float4(k + (key0 + key) * k_stride.token + column) : none;
            *as_float4(&values[key][column]) =
                visible ? *as_float4(v + (key0 + key) * v_stride.token + column) : none;
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
            float new_max = row_max[i];
            for (int j = 0; j < F32_KEYS / LANES; j++) {
                const bool visible = key0 + lane + LANES * j < end;
                scores[i][j] = visible ? scores[i][j] * scale_log2 : -INFINITY;
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

    for (int i = 0; i < ROWS; i++) {
        const float sum = sum_of<LANES>(row_sum[i]);
        const int query = first + row0 + i;
        if (query >= end) continue;
        float *to = out + ((int64_t)query * heads + head) * D + 4 * lane;
        for (int n = 0; n < D / 32; n++) {
            const float4 x = context[i][n];
            *as_float4(to + 32 * n) = {x.x / sum, x.y / sum, x.z / sum, x.w / sum};
        }
    }
}

// The kernel attention_NAME_D_Q of Q = 64 · M queries per thread block.
#define KERNEL(name, T, D, Q)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, Q == 64 ? 4 : 2)                         \
        attention_##name##_##D##_##Q(const T *q, const T *k, const T *v, T *out,                   \
                                     const uint32_t *tiles, int64_t q_head, int64_t q_token,       \
                                     int64_t k_head, int64_t k_token, int64_t v_head,              \
                                     int64_t v_token, int group, float scale) {                    \
        attend<D, Q / QUERIES>(q, k, v, out, tiles, {q_head, q_token}, {k_head, k_token},          \
                               {v_head, v_token}, group, scale);                                   \
    }
KERNEL(f32, float, 32, 64)
KERNEL(f32, float, 64, 64)
KERNEL(f16, f16, 32, 64)
KERNEL(f16, f16, 32, 128)
KERNEL(f16, f16, 64, 64)
KERNEL(f16, f16, 64, 128)
KERNEL(bf16, bf16, 32, 64)
KERNEL(bf16, bf16, 32, 128)
KERNEL(bf16, bf16, 64, 64)
KERNEL(bf16, bf16, 64, 128)
