// Disentangled attention of ragged sequences, with and without the masks of attention_band.cu: the
// raw score of query i and key j is qᵢ·kⱼ + qᵢ·K[r] + kⱼ·Q[r], where the relative position r depends
// on the distance j − i. He et al. 2021, equation 4, <https://arxiv.org/abs/2006.03654>.
#include "attention.cuh"

// For f16 and bf16: keys per tile, the distances of 64 queries from the keys of a tile, and the
// distances of 16 queries from 16 keys, each rounded up to a multiple of 16.
const int TILE = 32, SLOTS = QUERIES + TILE, NEAR = 32;

// A matrix of products of a warp. Its rows are padded, so that four rows are in different banks.
typedef float Products[16][NEAR + 8];

// The dynamic shared memory of f16 and bf16. src/lib.rs computes its size.
template <int W, typename T> struct Shared {
    Rows<TILE, W, T> keys, values;
    // The relative positions of distance `lowest + n` are in row n % SLOTS: those of a tile that are
    // not those of the preceding tile replace those that are not needed any more.
    Rows<SLOTS, W, T> relative_keys, relative_queries;
    // Of each warp: the products of its queries with relative keys, whose column is n % NEAR, and of
    // 16 keys with relative queries.
    Products of_queries[THREADS / 32], of_keys[THREADS / 32];
};

// Multiplies the 16 rows of `a` by the 8 rows of relative positions from n on, and stores the
// products from column `column` on.
template <int W, typename T>
__device__ inline void multiply_relative(Products &products, const uint32_t (&a)[W / 16][4],
                                         const Rows<SLOTS, W, T> &relative, int n, int column) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = column + 2 * (lane % 4);
    float sums[4] = {};
    for (int s = 0; s < W / 16; s += 2) {
        uint32_t b[4];
        load_matrices(b, &relative[(n + lane % 8) % SLOTS][16 * s + lane / 8 * 8]);
        mma(sums, a[s], b[0], b[1], T());
        mma(sums, a[s + 1], b[2], b[3], T());
    }
    store2(&products[row][pair], sums[0], sums[1]);
    store2(&products[row + 8][pair], sums[2], sums[3]);
}

// Adds the terms of the relative positions to the scores of the warp's 16 queries and the keys of a
// tile. Query 0 and key 0 have the distance `lowest + n + 15`. `computed` is the end of the distances
// for which `of_queries` has products.
template <int W, typename T>
__device__ inline void add_relative(Scores<1, TILE / 8> &scores, const Queries<W, 1> &queries,
                                    Shared<W, T> &shared, const Relative<T> &relative, int n,
                                    int &computed) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Products &of_queries = shared.of_queries[warp], &of_keys = shared.of_keys[warp];
#pragma unroll // else the scores are in local memory
    for (int part = 0; part < TILE / 16; part++, n += 16) {
        if (relative.keys) {
            for (int i = max(n, computed); i < n + NEAR; i += 8)
                multiply_relative<W>(of_queries, queries[0], shared.relative_keys, i, i % NEAR);
            computed = n + NEAR;
        }
        if (relative.queries) {
            uint32_t keys[W / 16][4];
            for (int s = 0; s < W / 16; s++)
                load_matrices(keys[s], &shared.keys[16 * part + lane % 16][16 * s + lane / 16 * 8]);
            for (int i = 0; i < NEAR; i += 8)
                multiply_relative<W>(of_keys, keys, shared.relative_queries, n + i, i);
        }
        __syncwarp();
        for (int group = 0; group < 2; group++)
            for (int i = 0; i < 4; i++) {
                const int query = lane / 4 + i / 2 * 8, key = 8 * group + 2 * (lane % 4) + i % 2;
                const int near = 15 + key - query;
                float &score = scores[0][2 * part + group][i];
                if (relative.keys) score += of_queries[query][(n + near) % NEAR];
                if (relative.queries) score += of_keys[key][near];
            }
        __syncwarp(); // all threads have read the products
    }
}

template <int W, typename T>
__device__ void attend_relative(Head<T, RELATIVE> head, const uint32_t *tiles, float scale,
                                const Positions &positions) {
    DYNAMIC_SHARED(memory);
    Shared<W, T> &shared = *reinterpret_cast<Shared<W, T> *>(memory);

    const Tile tile(tiles);
    tile.place_keys(head);
    const int first = tile.first, end = tile.queries.to, warp = threadIdx.x / 32;
    const int first_of_warp = first + 16 * warp;
    const int last_of_warp = min(end, first_of_warp + 16) - 1;
    const Range all =
        visible_keys(tile.keys, first, min(end, first + QUERIES) - 1, positions);
    const Range of_warp = visible_keys(tile.keys, first_of_warp, last_of_warp, positions);
    const int lowest = all.from - (first + QUERIES - 1);

    Queries<W, 1> queries;
    load_queries<W, 1>(queries, head, first_of_warp, end);

    const auto copy_relative = [&](Rows<SLOTS, W, T> &to, int from, int end, auto at) {
        for_groups_of_rows<W>(from, end, [&](int n, int column) {
            const T *row = at(lowest + n);
            copy_or_zero(&to[n % SLOTS][column], column < head.d ? row + column : row,
                         column < head.d);
        });
    };
    const float scale_log2 = scale * 1.44269504f;
    Softmax<W, 1> sums;
    for (int key0 = all.from, n0 = 0, computed = 0; key0 < all.to; key0 += TILE, n0 += TILE) {
        __syncthreads(); // all threads have finished with the previous tile
        copy_rows<W>(shared.keys, head.k, head.k_stride, key0, all.to, head.d);
        copy_rows<W>(shared.values, head.v, head.v_stride, key0, all.to, head.d);
        const int known = n0 == 0 ? 0 : n0 + QUERIES;
        if (head.relative.keys)
            copy_relative(shared.relative_keys, known, n0 + SLOTS, [&](int distance) {
                return head.relative.key(positions, distance);
            });
        if (head.relative.queries)
            copy_relative(shared.relative_queries, known, n0 + SLOTS, [&](int distance) {
                return head.relative.query(positions, distance);
            });
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        // Otherwise the warp has no queries, or they do not see a key of this tile.
        if (first_of_warp < end && of_warp.from < key0 + TILE && of_warp.to > key0) {
            bool is_partial = true;
            const auto visible = visible_in_tile<RELATIVE, TILE>(
                tile.keys, of_warp, first_of_warp, last_of_warp, key0, positions, is_partial);
            Scores<1, TILE / 8> scores = {};
            add_products<W, 1, true>(scores, queries, shared.keys, visible);
            add_relative<W>(scores, queries, shared, head.relative, n0 + QUERIES - 16 - 16 * warp, computed);
            add_values<W, 1, RELATIVE, true>(sums, scores, shared.values, visible, scale_log2,
                                             positions, key0 - first_of_warp);
        }
    }
    store_context<W, 1>(sums, head, tile, first_of_warp, positions, scale_log2);
}

template <int W>
__device__ void attend_relative(const Head<float, RELATIVE> &head, const uint32_t *tiles, float scale,
                                const Positions &positions) {
    attend<W, 1, RELATIVE>(head, tiles, scale, positions);
}

#define RELATIVE_KERNEL(name, T, W)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_relative_##name##_##W##_64( \
        const T *q, const T *k, const T *v, T *out, const uint32_t *tiles, int64_t q_head,         \
        int q_token, int64_t k_head, int k_token, int64_t v_head, int v_token,     \
        int group, int d, float scale, int first, int last,                       \
        const T *relative_keys, const T *relative_queries, int64_t keys_head, int keys_row,        \
        int64_t queries_head, int queries_row, const uint32_t *rows, int columns, int zero) {  \
        const int64_t head = blockIdx.y, heads = gridDim.y;                                        \
        const T *own_keys = relative_keys ? relative_keys + head * keys_head : nullptr;            \
        const T *own_queries = relative_queries ? relative_queries + head * queries_head : nullptr; \
        attend_relative<W>(                                                                        \
            Head<T, RELATIVE>{q + head * q_head, k + head / group * k_head, v + head / group * v_head,       \
                    out + head * d, q_token, k_token, v_token, (int)heads * d, d,                       \
                    {own_keys, own_queries, keys_row, queries_row}},                               \
            tiles, scale, Positions{first, last, columns, zero, nullptr, rows});      \
    }
#define RELATIVE_KERNELS(name, T)                                                                  \
    RELATIVE_KERNEL(name, T, 32)                                                                   \
    RELATIVE_KERNEL(name, T, 64)                                                                   \
    RELATIVE_KERNEL(name, T, 96)                                                                   \
    RELATIVE_KERNEL(name, T, 128)
FOR_ALL(RELATIVE_KERNELS)
