// Compares the kernels, run on a CPU, with the formulas in f64. scripts/cuda-check compiles and
// runs this program.
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../cuda/attention.cu"
#include "../cuda/attention_band.cu"
#include "../cuda/attention_bias.cu"
#undef KERNELS
#include "../cuda/attention_relative.cu"
#include "../cuda/epilogue.cu"
#undef KERNELS
#include "../cuda/norm.cu"
#undef KERNELS
#include "../cuda/pool.cu"
#undef KERNELS
#include "../cuda/rotary.cu"

std::mt19937 generator(20260);

template <typename T> double widened(T x) { return (float)x; }

template <typename T> std::vector<T> random_vector(size_t n, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<T> all(n);
    for (T &x : all) x = normal(generator);
    return all;
}

bool failed = false;

template <typename T>
void check(const char *name, const std::vector<T> &got, const std::vector<double> &expected,
           double tolerance) {
    double largest = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (std::isnan(widened(got[i])) && std::isnan(expected[i])) continue;
        const double difference = std::abs(widened(got[i]) - expected[i]);
        if (std::isnan(difference) || difference > largest) largest = difference; // NaN stays
    }
    const bool close = largest <= tolerance;
    failed |= !close;
    printf("%-40s largest difference %.1e, tolerance %.1e%s\n", name, largest, tolerance,
           close ? "" : " FAILED");
}

// What a query sees, and how a score is computed.
struct Case {
    const char *name;
    Kind kind;
    int first = 0, last = 0; // with a band, the distances of the visible keys
    int prefix = 0;          // number of keys of each sequence before those of its queries
    bool has_keys = true, has_queries = true; // RELATIVE: which terms the scores have
};

// The sanitizers are slow, and ThreadSanitizer most: heads of width 64 in f16, and in f32 without
// ThreadSanitizer, have more cases than others.
#ifdef __SANITIZE_THREAD__
template <typename T, int W> const bool has_all_cases = W == 64 && std::is_same_v<T, f16>;
template <typename T, int W> const bool has_long_cases = false;
#else
template <typename T, int W> const bool has_all_cases = W == 64 && !std::is_same_v<T, bf16>;
template <typename T, int W> const bool has_long_cases = has_all_cases<T, W>;
#endif

// Attention over sequences with lengths around multiples of the tile size; without a band or a bias,
// the last has four tiles. k and v are column ranges of one matrix, as a joint projection returns
// them. With a band or a bias, a key and its value are NaN. Heads have `d` of W columns.
template <typename T, int W>
void attention(const std::string &name, double tolerance, int d, const Case &test, auto kernel) {
    const auto [what, kind, first, last, prefix, has_keys, has_queries] = test;
    const std::vector<int> lengths =
        kind == WHOLE && has_long_cases<T, W> ? std::vector{1, 63, 64, 7, 65, 193}
                                              : std::vector{7, 130};
    const int heads = 2, groups = 1, group = heads / groups;
    const int radius = 250, columns = 2 * radius + 1, positions = 16;
    int n = 0, s = 0;
    std::vector<uint32_t> tiles;
    for (int length : lengths) {
        const int n_keys = prefix + length;
        for (int query = 0; query < length; query += QUERIES)
            for (int value : {n, n + length, n + query, prefix, s, s + n_keys})
                tiles.push_back(value);
        n += length;
        s += n_keys;
    }
    const int width = heads * d + 8, kv_width = 2 * groups * d;
    const auto queries = random_vector<T>((size_t)n * width, 1.5);
    auto kv = random_vector<T>((size_t)s * kv_width, 1.5);
    if (kind != WHOLE)
        for (int i = 0; i < kv_width; i++) kv[(size_t)(s - 100) * kv_width + i] = NAN;
    auto biases = random_vector<float>(heads * columns);
    biases[radius + 3] = biases[columns + radius] = -INFINITY;
    const int row = heads * d; // of relative positions
    const auto relative_keys = random_vector<T>(positions * row, 0.5),
               relative_queries = random_vector<T>(positions * row, 0.5);
    std::vector<uint32_t> rows(columns);
    for (int i = 0; i < columns; i++) // changes fast around distance 0
        rows[i] = std::abs(i - radius) < 6 ? 6 + i - radius : 5 + i * 8 / columns;
    std::vector<T> out((size_t)n * heads * d);
    out[0] = NAN;
    const T *q = queries.data(), *k = kv.data(), *v = k + groups * d;
    const float scale = 1 / std::sqrt((float)d);
    const Dim grid = {(unsigned)tiles.size() / 6, heads, 1};
    if constexpr (std::is_invocable_v<decltype(kernel), const T *, const T *, const T *, T *,
                                      const uint32_t *, int64_t, int, int64_t, int, int64_t, int,
                                      int, int, float, int, int, const float *, int, int>)
        launch(grid, THREADS, [&] {
            kernel(q, k, v, out.data(), tiles.data(), d, width, d, kv_width, d, kv_width, group, d,
                   scale, first, last, biases.data(), columns, radius);
        });
    else
        launch(grid, {THREADS, 1, 1}, sizeof(Shared<W, uint16_t>), [&] {
            kernel(q, k, v, out.data(), tiles.data(), d, width, d, kv_width, d, kv_width, group, d,
                   scale, first, last, has_keys ? relative_keys.data() : nullptr,
                   has_queries ? relative_queries.data() : nullptr, d, row, d, row, rows.data(),
                   columns, radius);
        });
    std::vector<double> expected(out.size());
    const auto product = [&](const T *x, const T *y) {
        double sum = 0;
        for (int i = 0; i < d; i++) sum += widened(x[i]) * widened(y[i]);
        return sum;
    };
    for (int h = 0; h < heads; h++) {
        int begin = 0, first_key = 0;
        for (int length : lengths) {
            const int n_keys = prefix + length;
            for (int t = 0; t < length; t++) {
                std::vector<double> weights(n_keys);
                double sum = 0;
                const auto is_visible = [&](int key) {
                    const int distance = key - prefix - t;
                    const bool is_near = first <= distance && distance <= last;
                    const float bias = biases[h * columns + radius + distance];
                    return (kind == WHOLE || is_near) && (kind != BIASED || bias != -INFINITY);
                };
                const auto key_at = [&](const T *x, int key) {
                    return x + (size_t)(first_key + key) * kv_width + h / group * d;
                };
                const T *query = q + (size_t)(begin + t) * width + h * d;
                for (int key = 0; key < n_keys; key++) {
                    if (!is_visible(key)) continue;
                    double dot = product(query, key_at(k, key));
                    const size_t at = rows[radius + key - prefix - t] * row + h * d;
                    if (kind == RELATIVE && has_keys) dot += product(query, &relative_keys[at]);
                    if (kind == RELATIVE && has_queries)
                        dot += product(key_at(k, key), &relative_queries[at]);
                    dot *= scale;
                    if (kind == BIASED) dot += biases[h * columns + radius + key - prefix - t];
                    sum += weights[key] = std::exp(dot);
                }
                for (int key = 0; key < n_keys; key++)
                    for (int i = 0; i < d && is_visible(key); i++)
                        expected[((size_t)(begin + t) * heads + h) * d + i] +=
                            weights[key] / sum * widened(key_at(v, key)[i]);
            }
            begin += length;
            first_key += n_keys;
        }
    }
    char full_name[96];
    snprintf(full_name, sizeof full_name, "%s, d = %d, %s", name.c_str(), d, what);
    check(full_name, out, expected, tolerance);
}

// Without a band or a bias, and with both in several forms. Heads fill their columns in some.
template <typename T, int W>
void attention(const std::string &name, double tolerance, auto whole, auto band, auto biased) {
    attention<T, W>(name, tolerance, W - 24, {"whole, prefix", WHOLE, 0, 0, 50}, whole);
    attention<T, W>(name, tolerance, W - 8, {"causal window", BAND, 2 - 20, 2}, band);
    attention<T, W>(name, tolerance, W, {"bias, prefix", BIASED, -500, 0, 20}, biased);
    if (!has_all_cases<T, W>) return;
    attention<T, W>(name, tolerance, W, {"whole", WHOLE}, whole);
    attention<T, W>(name, tolerance, W, {"window", BAND, -20, 20}, band);
    attention<T, W>(name, tolerance, W, {"causal, prefix", BAND, -500, 0, 50}, band);
    attention<T, W>(name, tolerance, W, {"no visible key", BAND, 30, 50}, band);
    attention<T, W>(name, tolerance, W - 16, {"bias", BIASED, -500, 500}, biased);
    attention<T, W>(name, tolerance, W, {"bias, window", BIASED, -3, 3}, biased);
    attention<T, W>(name, tolerance, W, {"bias, causal", BIASED, -500, 0}, biased);
}

template <typename T, int W>
void relative(const std::string &name, double tolerance, auto kernel) {
    attention<T, W>(name, tolerance, W, {"all terms", RELATIVE, -500, 500}, kernel);
    if (!has_all_cases<T, W>) return;
    attention<T, W>(name, tolerance, W - 8, {"window", RELATIVE, -20, 20}, kernel);
    attention<T, W>(name, tolerance, W, {"causal, prefix", RELATIVE, -500, 0, 30}, kernel);
    attention<T, W>(name, tolerance, W, {"keys", RELATIVE, -500, 500, 0, true, false}, kernel);
    attention<T, W>(name, tolerance, W, {"queries", RELATIVE, -500, 500, 0, false, true}, kernel);
}

std::vector<double> normalised(const std::vector<double> &x, int e, auto weight, auto bias) {
    std::vector<double> out(x.size());
    for (size_t row = 0; row < x.size() / e; row++) {
        double mean = 0, variance = 0;
        for (int i = 0; i < e; i++) mean += x[row * e + i] / e;
        for (int i = 0; i < e; i++) variance += std::pow(x[row * e + i] - mean, 2) / e;
        for (int i = 0; i < e; i++)
            out[row * e + i] = (x[row * e + i] - mean) / std::sqrt(variance + 1e-12) *
                                   widened(weight[i]) +
                               widened(bias[i]);
    }
    return out;
}

template <typename T>
void norm_embed_pool_epilogue(const char *dtype, double tolerance, auto short_norm, auto wide_norm,
                              auto short_embed, auto wide_embed, auto epilogue, auto pool) {
    char name[64];
    // Rows of 20, of 1,022 and of 1,026 elements are not loaded in groups of eight. Rows of 2,048
    // elements need several groups per thread.
    for (int e : {20, 384, 1022, 1024, 1026, 2048}) {
        const int rows = 5;
        const auto norm = e > MAX_ROW ? wide_norm : short_norm;
        const auto embed = e > MAX_ROW ? wide_embed : short_embed;
        const Dim grid = {e > MAX_ROW ? (unsigned)rows : 2, 1, 1};
        const auto x = random_vector<T>(rows * e), y = random_vector<T>(rows * e),
                   weight = random_vector<T>(e), bias = random_vector<T>(e);
        std::vector<T> out(rows * e);
        for (bool with_y : {false, true}) {
            launch(grid, 128, [&] {
                norm(x.data(), with_y ? y.data() : nullptr, weight.data(), bias.data(), out.data(),
                     rows, e, 1e-12f);
            });
            std::vector<double> sum(rows * e);
            for (int i = 0; i < rows * e; i++)
                sum[i] = widened(x[i]) + (with_y ? widened(y[i]) : 0);
            snprintf(name, sizeof name, "norm %s %d%s", dtype, e, with_y ? " of a sum" : "");
            check(name, out, normalised(sum, e, weight, bias), tolerance);
        }
        const std::vector<uint32_t> words = {3, 0, 6, 6, 1}, types = {0, 1, 0, 1, 1},
                                    positions = {0, 1, 2, 0, 3};
        const auto table = random_vector<T>(7 * e);
        for (bool with_types : {false, true}) {
            launch(grid, 128, [&] {
                embed(words.data(), with_types ? types.data() : nullptr, positions.data(),
                      table.data(), with_types ? x.data() : nullptr, y.data(), weight.data(),
                      bias.data(), out.data(), rows, e, 1e-12f, 7, with_types ? rows : 0, rows);
            });
            std::vector<double> sum(rows * e);
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < e; i++)
                    sum[row * e + i] = widened(table[words[row] * e + i]) +
                                       (with_types ? widened(x[types[row] * e + i]) : 0) +
                                       widened(y[positions[row] * e + i]);
            snprintf(name, sizeof name, "embed %s %d%s", dtype, e, with_types ? " with types" : "");
            check(name, out, normalised(sum, e, weight, bias), tolerance);
        }
        launch(grid, 128, [&] { // the last position id is 3, but the table has 3 rows
            embed(words.data(), types.data(), positions.data(), table.data(), x.data(), y.data(),
                  weight.data(), bias.data(), out.data(), rows, e, 1e-12f, 7, rows, 3);
        });
        const bool last_is_nan = std::isnan(widened(out[5 * e - 1])) && !std::isnan(widened(out[3 * e]));
        failed |= !last_is_nan;
        printf("%s id out of range%s\n", name, last_is_nan ? " gives NaN" : " FAILED");

        const std::vector<uint32_t> offsets = {0, 1, 3, 5};
        std::vector<float> pooled(3 * e);
        launch({3, (unsigned)(e / 2 + 127) / 128, 1}, 128,
               [&] { pool(x.data(), offsets.data(), pooled.data(), e); });
        std::vector<double> mean(3 * e);
        for (int b = 0; b < 3; b++)
            for (uint32_t t = offsets[b]; t < offsets[b + 1]; t++)
                for (int i = 0; i < e; i++)
                    mean[b * e + i] += widened(x[t * e + i]) / (offsets[b + 1] - offsets[b]);
        snprintf(name, sizeof name, "mean %s %d", dtype, e);
        check(name, pooled, mean, 1e-6);
    }
    // Rows of 36 elements, and those that start at element 2, are not loaded in groups of eight.
    for (auto [columns, start] : {std::pair{40, 0}, {36, 0}, {40, 2}}) {
        const int rows = 9;
        const auto x = random_vector<T>(start + rows * columns, 3), bias = random_vector<T>(columns);
        const auto factor = random_vector<T>(start + rows * columns),
                   factor_bias = random_vector<T>(columns);
        const char *names[] = {"none", "gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu", "mish",
                               "sigmoid"};
        for (int with_factor = 0; with_factor <= 1; with_factor++)
        for (int activation = NONE; activation <= SIGMOID; activation++) {
            auto y = x;
            launch({1, 1, 1}, 128, [&] {
                epilogue(y.data() + start, bias.data(), with_factor ? factor.data() + start : nullptr,
                         factor_bias.data(), rows * columns, columns, activation);
            });
            std::vector<double> expected(x.begin(), x.end());
            for (int i = 0; i < rows * columns; i++) {
                const double z = widened(x[start + i]) + widened(bias[i % columns]);
                const double values[] = {
                    z,
                    0.5 * z * (1 + std::erf(z / std::sqrt(2.0))),
                    0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z))),
                    std::max(z, 0.0),
                    z / (1 + std::exp(-z)),
                    std::tanh(z),
                    z / (1 + std::exp(-1.702 * z)),
                    z * std::tanh(std::log1p(std::exp(z))),
                    1 / (1 + std::exp(-z))};
                const double f =
                    with_factor ? widened(factor[start + i]) + widened(factor_bias[i % columns]) : 1;
                expected[start + i] = values[activation] * f;
            }
            snprintf(name, sizeof name, "%s %s %d%s", names[activation], dtype, columns,
                     with_factor ? ", gated" : "");
            check(name, y, expected, (with_factor ? 8 : 4) * tolerance);
        }
    }
}

// Rows of 20 and of 2,050 elements, and those that start at element 2, are not loaded in groups of
// eight. Rows of 8,192 elements need several groups per thread.
template <typename T> void rms_norm(const char *dtype, double tolerance, auto kernel) {
    for (auto [e, start] : {std::pair{20, 0}, {384, 0}, {384, 2}, {2050, 0}, {8192, 0}}) {
        const int rows = 3;
        const auto x = random_vector<T>(start + rows * e), y = random_vector<T>(start + rows * e);
        const auto weight = random_vector<float>(e);
        for (bool with_y : {false, true}) {
            std::vector<T> out(rows * e);
            launch({rows, 1, 1}, 128, [&] {
                kernel(x.data() + start, with_y ? y.data() + start : nullptr, weight.data(),
                       out.data(), e, 0.1f);
            });
            std::vector<double> expected(rows * e);
            for (int row = 0; row < rows; row++) {
                const auto at = [&](int i) {
                    const int j = start + row * e + i;
                    return widened(x[j]) + (with_y ? widened(y[j]) : 0);
                };
                double square = 0;
                for (int i = 0; i < e; i++) square += at(i) * at(i) / e;
                for (int i = 0; i < e; i++)
                    expected[row * e + i] = at(i) / std::sqrt(square + 0.1f) * weight[i];
            }
            char name[64];
            snprintf(name, sizeof name, "rms norm %s %d from %d%s", dtype, e, start,
                     with_y ? " of a sum" : "");
            check(name, out, expected, tolerance);
        }
    }
}

// l2_normalize: a row of zeros stays zero, and a row with a NaN becomes NaN.
void normalize_rows() {
    for (int e : {1, 24, 384}) {
        const int rows = 5;
        auto x = random_vector<float>(rows * e);
        for (int i = 0; i < e; i++) x[i] = 0;
        std::vector<float> out(rows * e);
        launch({2, 1, 1}, 128, [&] { l2_normalize(x.data(), out.data(), rows, e); });
        std::vector<double> expected(x.begin(), x.end());
        for (int row = 1; row < rows; row++) {
            double square = 0;
            for (int i = 0; i < e; i++) square += std::pow(x[row * e + i], 2);
            for (int i = 0; i < e; i++) expected[row * e + i] /= std::sqrt(square);
        }
        char name[64];
        snprintf(name, sizeof name, "l2 normalize %d", e);
        check(name, out, expected, 1e-6);
        x[e - 1] = NAN;
        launch({2, 1, 1}, 128, [&] { l2_normalize(x.data(), out.data(), rows, e); });
        const bool first_is_nan = std::isnan(out[0]) && !std::isnan(out[e]);
        failed |= !first_is_nan;
        printf("%s of NaN%s\n", name, first_is_nan ? " gives NaN" : " FAILED");
    }
}

// Rotates two of three heads of a matrix of tokens. Rows of 24 values, and those that start at
// element 2, are not loaded in groups of eight pairs.
template <typename T> void rotary(const char *dtype, double tolerance, auto kernel) {
    for (auto [d, start] : {std::pair{64, 0}, {24, 0}, {32, 2}}) {
        const int tokens = 7, half = d / 2, width = 3 * d;
        const auto x = random_vector<T>(start + tokens * width);
        const auto cos = random_vector<float>(tokens * half), sin = random_vector<float>(tokens * half);
        auto y = x;
        launch({2, 1, 1}, 128, [&] {
            kernel(y.data() + start, cos.data(), sin.data(), d, width, 2, tokens, half);
        });
        std::vector<double> expected(x.begin(), x.end());
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < 2 * half; i++) {
                const int at = start + t * width + i / half * d + i % half;
                const double a = widened(x[at]), b = widened(x[at + half]);
                const double c = cos[t * half + i % half], s = sin[t * half + i % half];
                expected[at] = a * c - b * s;
                expected[at + half] = b * c + a * s;
            }
        char name[64];
        snprintf(name, sizeof name, "rotary %s %d from %d", dtype, d, start);
        check(name, y, expected, tolerance);
    }
}

// Normalises three of four heads of a matrix of tokens, two of queries and one of keys, with and
// without a rotation. Heads of 160 values need two groups per thread.
template <typename T> void heads(const char *dtype, double tolerance, auto kernel) {
    for (auto [d, start] : {std::pair{64, 0}, {24, 0}, {32, 2}, {160, 0}}) {
        const int tokens = 7, half = d / 2, width = 4 * d;
        const auto x = random_vector<T>(start + tokens * width);
        const auto cos = random_vector<float>(tokens * half), sin = random_vector<float>(tokens * half);
        const auto query = random_vector<float>(d), key = random_vector<float>(d);
        for (bool rotates : {false, true}) {
            auto y = x;
            launch({6, 1, 1}, 128, [&] { // 24 warps for 21 rows
                kernel(y.data() + start, query.data(), key.data(), rotates ? cos.data() : nullptr,
                       rotates ? sin.data() : nullptr, d, width, 2, 3, tokens, half, 0.1f);
            });
            std::vector<double> expected(x.begin(), x.end());
            for (int t = 0; t < tokens; t++)
                for (int h = 0; h < 3; h++) {
                    double *head = expected.data() + start + t * width + h * d;
                    double square = 0;
                    for (int i = 0; i < d; i++) square += head[i] * head[i] / d;
                    for (int i = 0; i < d; i++)
                        head[i] *= (h < 2 ? query : key)[i] / std::sqrt(square + 0.1f);
                    for (int i = 0; i < half && rotates; i++) {
                        const double a = head[i], b = head[half + i];
                        const double c = cos[t * half + i], s = sin[t * half + i];
                        head[i] = a * c - b * s;
                        head[half + i] = b * c + a * s;
                    }
                }
            char name[64];
            snprintf(name, sizeof name, "heads %s %d from %d%s", dtype, d, start,
                     rotates ? ", rotated" : "");
            check(name, y, expected, tolerance);
        }
    }
}

int main() {
#define ATTENTION(name, T, W, Q, tolerance)                                                        \
    attention<T, W>("attention " #name " " #W " " #Q, tolerance, attention_##name##_##W##_##Q,      \
                    attention_band_##name##_##W##_##Q, attention_bias_##name##_##W##_##Q);
#define ATTENTION_AND_RELATIVE(name, T, W, tolerance)                                              \
    ATTENTION(name, T, W, 64, tolerance)                                                           \
    relative<T, W>("relative " #name " " #W, 2 * tolerance, attention_relative_##name##_##W##_64);
#define ATTENTION_OF_ALL_WIDTHS(name, T, tolerance)                                                \
    ATTENTION_AND_RELATIVE(name, T, 32, tolerance)                                                 \
    ATTENTION_AND_RELATIVE(name, T, 64, tolerance)                                                 \
    ATTENTION_AND_RELATIVE(name, T, 96, tolerance)                                                 \
    ATTENTION_AND_RELATIVE(name, T, 128, tolerance)
    ATTENTION(f16, f16, 32, 128, 4e-3)
#ifdef __SANITIZE_THREAD__
    ATTENTION_AND_RELATIVE(f32, float, 64, 1e-5)
    ATTENTION_AND_RELATIVE(f16, f16, 64, 4e-3)
    ATTENTION_AND_RELATIVE(f16, f16, 96, 4e-3)
#else
    ATTENTION_OF_ALL_WIDTHS(f32, float, 1e-5)
    ATTENTION_OF_ALL_WIDTHS(f16, f16, 4e-3)
    ATTENTION_OF_ALL_WIDTHS(bf16, bf16, 3e-2)
    ATTENTION(f16, f16, 64, 128, 4e-3)
    ATTENTION(bf16, bf16, 32, 128, 3e-2)
    ATTENTION(bf16, bf16, 64, 128, 3e-2)
#endif
    norm_embed_pool_epilogue<float>("f32", 4e-6, add_layer_norm_f32, add_layer_norm_wide_f32,
                                    embed_layer_norm_f32, embed_layer_norm_wide_f32, epilogue_f32,
                                    mean_pool_f32);
    norm_embed_pool_epilogue<f16>("f16", 6e-3, add_layer_norm_f16, add_layer_norm_wide_f16,
                                  embed_layer_norm_f16, embed_layer_norm_wide_f16, epilogue_f16,
                                  mean_pool_f16);
    norm_embed_pool_epilogue<bf16>("bf16", 5e-2, add_layer_norm_bf16, add_layer_norm_wide_bf16,
                                   embed_layer_norm_bf16, embed_layer_norm_wide_bf16,
                                   epilogue_bf16, mean_pool_bf16);
    rms_norm<float>("f32", 8e-6, add_rms_norm_f32);
    rms_norm<f16>("f16", 8e-3, add_rms_norm_f16);
    rms_norm<bf16>("bf16", 6e-2, add_rms_norm_bf16);
    normalize_rows();
    rotary<float>("f32", 2e-6, rotate_f32);
    rotary<f16>("f16", 8e-3, rotate_f16);
    rotary<bf16>("bf16", 6e-2, rotate_bf16);
    heads<float>("f32", 8e-6, normalise_heads_f32);
    heads<f16>("f16", 1.6e-2, normalise_heads_f16);
    heads<bf16>("bf16", 1.3e-1, normalise_heads_bf16);
    return failed;
}
