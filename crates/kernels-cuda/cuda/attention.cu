// softmax(q·kᵀ · scale) · v of packed sequences, each attending to itself: Dao et al. 2022 and 2023,
// <https://arxiv.org/abs/2205.14135>, <https://arxiv.org/abs/2307.08691>. A block has 64 queries of
// one sequence and head and goes over the keys 64 at a time, a warp 16 of the queries. Of 16-bit
// numbers scores stay in registers and the products are the tensor cores'; those of f32, exact, go
// over 32 keys at a time, four queries a thread.
#include "numbers.cuh"

const int QUERIES = 64, KEYS = 64, THREADS = 128;

// What a row of numbers in shared memory is longer by, so that eight rows are in different banks.
const int PAD = 8;

// Numbers from one head to the next, and from one token to the next.
struct Strides {
    int64_t head, token;
};

// tiles: for each block the sequence's first token and its end, and the first query.
template <int D, typename T>
__device__ void attend(const T *q, const T *k, const T *v, T *out, const uint32_t *tiles,
                       Strides of_q, Strides of_k, Strides of_v, int group, float scale) {
    alignas(16) __shared__ T keys[KEYS][D + PAD];
    alignas(16) __shared__ T values[D][KEYS + PAD]; // transposed

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const int begin = tile[0], end = tile[1];
    const int head = blockIdx.y, heads = gridDim.y;
    const int lane = threadIdx.x % 32, row = lane / 4, pair = 2 * (lane % 4);
    const int first = tile[2] + threadIdx.x / 32 * 16 + row; // and the one 8 further
    q += head * of_q.head;
    k += head / group * of_k.head;
    v += head / group * of_v.head;

    uint32_t queries[D / 16][4];
    for (int s = 0; s < D / 16; s++)
        for (int i = 0; i < 4; i++) {
            const int query = first + i % 2 * 8, column = 16 * s + pair + i / 2 * 8;
            queries[s][i] = query < end ? both(q + query * of_q.token + column) : 0;
        }

    const float in_base_2 = scale * 1.44269504f;
    float context[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int at = begin; at < end; at += KEYS) {
        __syncthreads(); // all have done with the keys before
        for (int i = threadIdx.x; i < KEYS * D / 8; i += THREADS) {
            const int key = i / (D / 8), column = i % (D / 8) * 8;
            uint4 eight = {0, 0, 0, 0};
            if (at + key < end)
                eight = *reinterpret_cast<const uint4 *>(k + (at + key) * of_k.token + column);
            *reinterpret_cast<uint4 *>(&keys[key][column]) = eight;
        }
        for (int i = threadIdx.x; i < KEYS * D / 8; i += THREADS) {
            const int key = i % KEYS, column = i / KEYS * 8;
            uint4 eight = {0, 0, 0, 0};
            if (at + key < end)
                eight = *reinterpret_cast<const uint4 *>(v + (at + key) * of_v.token + column);
            const T *numbers = reinterpret_cast<const T *>(&eight);
            for (int j = 0; j < 8; j++) values[column + j][key] = numbers[j];
        }
        __syncthreads();

        // 1. Scores of 16 queries and 64 keys: a thread has two neighbours in two rows of each 8 keys.
        float scores[KEYS / 8][4] = {};
        for (int n = 0; n < KEYS / 8; n++)
            for (int s = 0; s < D / 16; s++) {
                const T *of_row = &keys[8 * n + row][16 * s + pair];
                multiply(scores[n], queries[s], both(of_row), both(of_row + 8), T());
            }
        for (int n = 0; n < KEYS / 8; n++)
            for (int i = 0; i < 4; i++) {
                const bool visible = at + 8 * n + pair + i % 2 < end;
                scores[n][i] = visible ? scores[n][i] * in_base_2 : -INFINITY;
            }

        // 2. Softmax so far: what there is shrinks to the new largest score.
        for (int r = 0; r < 2; r++) {
            float most = largest[r];
            for (int n = 0; n < KEYS / 8; n++)
                most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            most = max_of<4>(most);
            const float shrink = exp2f(largest[r] - most);
            largest[r] = most;
            total[r] *= shrink;
            for (int n = 0; n < D / 8; n++) {
                context[n][2 * r] *= shrink;
                context[n][2 * r + 1] *= shrink;
            }
        }
        for (int n = 0; n < KEYS / 8; n++)
            for (int i = 0; i < 4; i++) {
                scores[n][i] = exp2f(scores[n][i] - largest[i / 2]);
                total[i / 2] += scores[n][i];
            }

        // 3. Mix the values: the scores lie as the product wants them.
        for (int s = 0; s < KEYS / 16; s++) {
            const float(&left)[4] = scores[2 * s], (&right)[4] = scores[2 * s + 1];
            const uint32_t weights[4] = {both<T>(left[0], left[1]), both<T>(left[2], left[3]),
                                         both<T>(right[0], right[1]), both<T>(right[2], right[3])};
            for (int n = 0; n < D / 8; n++) {
                const T *of_column = &values[8 * n + row][16 * s + pair];
                multiply(context[n], weights, both(of_column), both(of_column + 8), T());
            }
        }
    }

    for (int r = 0; r < 2; r++) {
        const float sum = sum_of<4>(total[r]);
        const int query = first + 8 * r;
        if (query >= end) continue;
        T *to = out + ((int64_t)query * heads + head) * D + pair;
        for (int n = 0; n < D / 8; n++)
            store2(to + 8 * n, context[n][2 * r] / sum, context[n][2 * r + 1] / sum);
    }
}

__device__ inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

template <int D>
__device__ void attend(const float *q, const float *k, const float *v, float *out,
                       const uint32_t *tiles, Strides of_q, Strides of_k, Strides of_v, int group,
                       float scale) {
    // Eight threads have four queries together: each every eighth key, and then of the context every
    // eighth four columns. Rows are longer by four, so that those of eight threads are in all banks.
    const int FEW = 32, OWN = 4, SHARERS = 8, WIDTH = D + 4;
    alignas(16) __shared__ float queries[QUERIES][WIDTH];
    alignas(16) __shared__ float keys[FEW][WIDTH];
    alignas(16) __shared__ float values[FEW][D];
    alignas(16) __shared__ float weights[QUERIES][FEW + 4];

    const uint32_t *tile = tiles + 3 * blockIdx.x;
    const int begin = tile[0], end = tile[1], first = tile[2];
    const int head = blockIdx.y, heads = gridDim.y;
    const int sharer = threadIdx.x % SHARERS, own = threadIdx.x / SHARERS * OWN;
    q += head * of_q.head;
    k += head / group * of_k.head;
    v += head / group * of_v.head;

    const float4 none = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < QUERIES * D / 4; i += THREADS) {
        const int query = i / (D / 4), column = i % (D / 4) * 4;
        *four(&queries[query][column]) =
            first + query < end ? *four(q + (first + query) * of_q.token + column) : none;
    }

    const float in_base_2 = scale * 1.44269504f;
    float4 context[OWN][D / 32] = {};
    float largest[OWN], total[OWN] = {};
    for (int i = 0; i < OWN; i++) largest[i] = -INFINITY;
    for (int at = begin; at < end; at += FEW) {
        __syncthreads(); // all have done with the keys before
        for (int i = threadIdx.x; i < FEW * D / 4; i += THREADS) {
            const int key = i / (D / 4), column = i % (D / 4) * 4;
            const bool visible = at + key < end;
            *four(&keys[key][column]) =
                visible ? *four(k + (at + key) * of_k.token + column) : none;
            *four(&values[key][column]) =
                visible ? *four(v + (at + key) * of_v.token + column) : none;
        }
        __syncthreads();

        // 1. Scores.
        float scores[OWN][FEW / SHARERS] = {};
        for (int column = 0; column < D; column += 4)
            for (int i = 0; i < OWN; i++)
                for (int j = 0; j < FEW / SHARERS; j++)
                    scores[i][j] = dot(*four(&queries[own + i][column]),
                                       *four(&keys[sharer + SHARERS * j][column]), scores[i][j]);

        // 2. Softmax so far: what there is shrinks to the new largest score.
        for (int i = 0; i < OWN; i++) {
            float most = largest[i];
            for (int j = 0; j < FEW / SHARERS; j++) {
                const bool visible = at + sharer + SHARERS * j < end;
                scores[i][j] = visible ? scores[i][j] * in_base_2 : -INFINITY;
                most = fmaxf(most, scores[i][j]);
            }
            most = max_of<SHARERS>(most);
            const float shrink = exp2f(largest[i] - most);
            largest[i] = most;
            total[i] *= shrink;
            for (float4 &x : context[i]) x = {x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
            for (int j = 0; j < FEW / SHARERS; j++) {
                const float weight = exp2f(scores[i][j] - most);
                total[i] += weight;
                weights[own + i][sharer + SHARERS * j] = weight;
            }
        }
        __syncwarp(); // which has all that share its queries

        // 3. Mix the values.
        for (int key = 0; key < FEW; key++)
            for (int n = 0; n < D / 32; n++) {
                const float4 value = *four(&values[key][32 * n + 4 * sharer]);
                for (int i = 0; i < OWN; i++) {
                    const float weight = weights[own + i][key];
                    float4 &x = context[i][n];
                    x = {fmaf(weight, value.x, x.x), fmaf(weight, value.y, x.y),
                         fmaf(weight, value.z, x.z), fmaf(weight, value.w, x.w)};
                }
            }
    }

    for (int i = 0; i < OWN; i++) {
        const float sum = sum_of<SHARERS>(total[i]);
        const int query = first + own + i;
        if (query >= end) continue;
        float *to = out + ((int64_t)query * heads + head) * D + 4 * sharer;
        for (int n = 0; n < D / 32; n++) {
            const float4 x = context[i][n];
            *four(to + 32 * n) = {x.x / sum, x.y / sum, x.z / sum, x.w / sum};
        }
    }
}

#define KERNEL(name, T, D)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##name##_##D(                  \
        const T *q, const T *k, const T *v, T *out, const uint32_t *tiles, int64_t q_head,         \
        int64_t q_token, int64_t k_head, int64_t k_token, int64_t v_head, int64_t v_token,         \
        int group, float scale) {                                                                  \
        attend<D>(q, k, v, out, tiles, {q_head, q_token}, {k_head, k_token}, {v_head, v_token},    \
                  group, scale);                                                                   \
    }
KERNEL(f32, float, 32)
KERNEL(f32, float, 64)
KERNEL(f16, f16, 32)
KERNEL(f16, f16, 64)
KERNEL(bf16, bf16, 32)
KERNEL(bf16, bf16, 64)
