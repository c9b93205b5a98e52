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

// Attention over sequences with lengths around multiples of the tile size; without a band or a bias, the last has four tiles.
// q, k and v are column ranges of one matrix, as a joint projection returns them. A query sees the
// keys at the distances `first..=last`. With a band or a bias, a key and its value are NaN.
template <typename T, int D>
void attention(const std::string &name, double tolerance, Kind kind, int first, int last,
               auto kernel) {
    // The sanitizers are slow: fewer sequences with a band or a bias.
    const std::vector<int> lengths =
        kind == WHOLE ? std::vector{1, 63, 64, 7, 65, 193} : std::vector{7, 130};
    const int heads = 2, groups = 1, group = heads / groups;
    const int radius = 200, columns = 2 * radius + 1;
    int n = 0;
    std::vector<uint32_t> tiles;
    for (int length : lengths) {
        for (int query = 0; query < length; query += QUERIES)
            tiles.insert(tiles.end(), {(uint32_t)n, (uint32_t)(n + length), (uint32_t)(n + query)});
        n += length;
    }
    const int width = (heads + 2 * groups) * D;
    auto qkv = random_vector<T>((size_t)n * width, 1.5);
    if (kind != WHOLE)
        for (int i = heads * D; i < width; i++) qkv[(size_t)(n - 100) * width + i] = NAN;
    auto biases = random_vector<float>(heads * columns);
    biases[radius + 3] = biases[columns + radius] = -INFINITY;
    std::vector<T> out((size_t)n * heads * D);
    out[0] = NAN;
    const T *q = qkv.data(), *k = q + heads * D, *v = k + groups * D;
    const float scale = 1 / std::sqrt((float)D);
    launch({(unsigned)tiles.size() / 3, heads, 1}, THREADS, [&] {
        kernel(q, k, v, out.data(), tiles.data(), D, width, D, width, D, width, group, scale, first,
               last, biases.data(), columns, radius);
    });
    std::vector<double> expected(out.size());
    for (int h = 0; h < heads; h++) {
        int begin = 0;
        for (int length : lengths) {
            for (int t = begin; t < begin + length; t++) {
                std::vector<double> weights(length);
                double sum = 0;
                const auto is_visible = [&](int s) {
                    const int distance = begin + s - t;
                    const bool is_near = first <= distance && distance <= last;
                    const float bias = biases[h * columns + radius + distance];
                    return (kind == WHOLE || is_near) && (kind != BIASED || bias != -INFINITY);
                };
                for (int s = 0; s < length; s++) {
                    if (!is_visible(s)) continue;
                    double dot = 0;
                    for (int d = 0; d < D; d++)
                        dot += widened(q[(size_t)t * width + h * D + d]) *
                               widened(k[(size_t)(begin + s) * width + h / group * D + d]);
                    dot *= scale;
                    if (kind == BIASED) dot += biases[h * columns + radius + begin + s - t];
                    sum += weights[s] = std::exp(dot);
                }
                for (int s = 0; s < length; s++)
                    for (int d = 0; d < D && is_visible(s); d++)
                        expected[((size_t)t * heads + h) * D + d] +=
                            weights[s] / sum *
                            widened(v[(size_t)(begin + s) * width + h / group * D + d]);
            }
            begin += length;
        }
    }
    check(name.c_str(), out, expected, tolerance);
}

// Without a band or a bias, and with both in several forms.
template <typename T, int D>
void attention(const std::string &name, double tolerance, auto whole, auto band, auto biased) {
    attention<T, D>(name, tolerance, WHOLE, 0, 0, whole);
    attention<T, D>(name + ", window", tolerance, BAND, -20, 20, band);
    attention<T, D>(name + ", causal window", tolerance, BAND, 2 - 20, 2, band);
    attention<T, D>(name + ", no visible key", tolerance, BAND, 30, 50, band);
    attention<T, D>(name + ", bias", tolerance, BIASED, -500, 500, biased);
    attention<T, D>(name + ", bias, window", tolerance, BIASED, -3, 3, biased);
    attention<T, D>(name + ", bias, causal", tolerance, BIASED, -500, 0, biased);
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
void norm_embed_pool_epilogue(const char *dtype, double tolerance, auto norm, auto embed,
                              auto epilogue, auto pool) {
    char name[64];
    // Rows of 20 and of 1,022 elements are not loaded in groups of eight.
    for (int e : {20, 384, 1022, 1024}) {
        const int rows = 5;
        const auto x = random_vector<T>(rows * e), y = random_vector<T>(rows * e),
                   weight = random_vector<T>(e), bias = random_vector<T>(e);
        std::vector<T> out(rows * e);
        for (bool with_y : {false, true}) {
            launch({2, 1, 1}, 128, [&] {
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
        launch({2, 1, 1}, 128, [&] {
            embed(words.data(), types.data(), positions.data(), table.data(), x.data(), y.data(),
                  weight.data(), bias.data(), out.data(), rows, e, 1e-12f, 7, rows, rows);
        });
        std::vector<double> sum(rows * e);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < e; i++)
                sum[row * e + i] = widened(table[words[row] * e + i]) +
                                   widened(x[types[row] * e + i]) + widened(y[positions[row] * e + i]);
        snprintf(name, sizeof name, "embed %s %d", dtype, e);
        check(name, out, normalised(sum, e, weight, bias), tolerance);
        launch({2, 1, 1}, 128, [&] { // the last position id is 3, but the table has 3 rows
            embed(words.data(), types.data(), positions.data(), table.data(), x.data(), y.data(),
                  weight.data(), bias.data(), out.data(), rows, e, 1e-12f, 7, rows, 3);
        });
        const bool last_is_nan = std::isnan(widened(out[4 * e])) && !std::isnan(widened(out[3 * e]));
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
        const char *names[] = {"none", "gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu", "mish"};
        for (int activation = NONE; activation <= MISH; activation++) {
            auto y = x;
            launch({1, 1, 1}, 128, [&] {
                epilogue(y.data() + start, bias.data(), rows * columns, columns, activation);
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
                    z * std::tanh(std::log1p(std::exp(z)))};
                expected[start + i] = values[activation];
            }
            snprintf(name, sizeof name, "%s %s %d", names[activation], dtype, columns);
            check(name, y, expected, 4 * tolerance);
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
#define ATTENTION(name, T, D, Q, tolerance)                                                        \
    attention<T, D>("attention " #name " " #D " " #Q, tolerance, attention_##name##_##D##_##Q,      \
                    attention_band_##name##_##D##_##Q, attention_bias_##name##_##D##_##Q);
    ATTENTION(f32, float, 32, 64, 1e-5)
    ATTENTION(f32, float, 64, 64, 1e-5)
    ATTENTION(f16, f16, 32, 64, 4e-3)
    ATTENTION(f16, f16, 64, 64, 4e-3)
    ATTENTION(bf16, bf16, 32, 64, 3e-2)
    ATTENTION(bf16, bf16, 64, 64, 3e-2)
    ATTENTION(f16, f16, 32, 128, 4e-3)
    ATTENTION(f16, f16, 64, 128, 4e-3)
    ATTENTION(bf16, bf16, 32, 128, 3e-2)
    ATTENTION(bf16, bf16, 64, 128, 3e-2)
    norm_embed_pool_epilogue<float>("f32", 4e-6, add_layer_norm_f32, embed_layer_norm_f32,
                                    epilogue_f32, mean_pool_f32);
    norm_embed_pool_epilogue<f16>("f16", 6e-3, add_layer_norm_f16, embed_layer_norm_f16,
                                  epilogue_f16, mean_pool_f16);
    norm_embed_pool_epilogue<bf16>("bf16", 5e-2, add_layer_norm_bf16, embed_layer_norm_bf16,
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
