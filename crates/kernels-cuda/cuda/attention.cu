// softmax(q·kᵀ · scale) · v of packed sequences, each attending to itself: Dao et al. 2022 and 2023,
// <https://arxiv.org/abs/2205.14135>, <https://arxiv.org/abs/2307.08691>. A block has 64 queries of
// one sequence and head and goes over the keys 64 at a time, a warp 16 of the queries; scores stay in
// registers, the products are the tensor cores'.
#include "numbers.cuh"

const int KEYS = 64, THREADS = 128;

// What a row of numbers in shared memory is longer by, so that eight rows are in different banks.
const int PAD = 8;

// Numbers from one head to the next, and from one token to the next.
struct Strides {
    int64_t head, token;
};

// tiles: for each block the sequence's first token and its end, and the first query.
template <typename T, int D>
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
            most = max_of_four(most);
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
        const float sum = sum_of_four(total[r]);
        const int query = first + 8 * r;
        if (query >= end) continue;
        T *to = out + ((int64_t)query * heads + head) * D + pair;
        for (int n = 0; n < D / 8; n++)
            store2(to + 8 * n, context[n][2 * r] / sum, context[n][2 * r + 1] / sum);
    }
}

#define KERNEL(name, T, D)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) attention_##name##_##D(                  \
        const T *q, const T *k, const T *v, T *out, const uint32_t *tiles, int64_t q_head,         \
        int64_t q_token, int64_t k_head, int64_t k_token, int64_t v_head, int64_t v_token,         \
        int group, float scale) {                                                                  \
        attend<T, D>(q, k, v, out, tiles, {q_head, q_token}, {k_head, k_token},                    \
                     {v_head, v_token}, group, scale);                                             \
    }
KERNEL(f16, f16, 32)
KERNEL(f16, f16, 64)
KERNEL(bf16, bf16, 32)
KERNEL(bf16, bf16, 64)
