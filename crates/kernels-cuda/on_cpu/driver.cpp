// As much of CUDA's driver, cuBLAS, cublasLt and cuRAND as the program calls, on a CPU: memory is the
// heap's, all is done when a call returns, and a kernel is whatever `build.py` has registered under its
// name. What a driver would refuse or a GPU would corrupt ends the program with a word.
#include "gpu.h"
#include "registry.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

[[noreturn]] static void end(const char *what, const std::string &of) {
    fprintf(stderr, "the GPU on the CPU: %s %s\n", what, of.c_str());
    abort();
}

static std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}
void add_kernel(const char *name, Kernel kernel) { kernels()[name] = kernel; }

// The device, its context and its streams: one of each.
static char handle;
static void *const HANDLE = &handle;
static thread_local void *context;
API int cuInit(unsigned) { return 0; }
API int cuDeviceGetCount(int *n) { return *n = 1, 0; }
API int cuDeviceGet(int *device, int n) { return *device = n, n == 0 ? 0 : 101; }
API int cuDeviceGetAttribute(int *value, int attribute, int) {
    const int MAJOR = 75, MINOR = 76;
    *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : 1;
    return 0;
}
API int cuDevicePrimaryCtxRetain(void **c, int) { return *c = HANDLE, 0; }
API int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API int cuCtxSetCurrent(void *c) { return context = c, 0; }
API int cuCtxGetCurrent(void **c) { return *c = context, 0; }
API int cuStreamWaitEvent(void *, void *, unsigned) { return 0; }
static int tell(const char **text, int error) {
    static thread_local std::string told;
    told = "error " + std::to_string(error) + " of the GPU on the CPU";
    return *text = told.c_str(), 0;
}
API int cuGetErrorName(int error, const char **text) { return tell(text, error); }
API int cuGetErrorString(int error, const char **text) { return tell(text, error); }

// What a stream is asked to do, at once or whenever its graph is launched.
typedef std::vector<std::function<void()>> Graph;
static thread_local Graph *recording;
static const int NOT_WHILE_RECORDING = 900, FAILED_BEFORE = 901;
// The call that a recording fails at, as all that follow do, if a test wants that.
static const int FAILS_AT = getenv("GPU_FAILS_AT") ? atoi(getenv("GPU_FAILS_AT")) : INT32_MAX;
static thread_local int recorded;
static int fails() {
    if (!recording || ++recorded < FAILS_AT) return 0;
    return recorded == FAILS_AT ? NOT_WHILE_RECORDING : FAILED_BEFORE;
}
static int ask(std::function<void()> work) {
    if (const int error = fails()) return error;
    if (recording)
        recording->push_back(work);
    else
        work();
    return 0;
}
API int cuStreamIsCapturing(void *, int *status) { return *status = recording != nullptr, 0; }
API int cuStreamBeginCapture_v2(void *, int) {
    return recorded = 0, recording = new Graph, 0;
}
API int cuStreamSynchronize(void *) { return recording ? NOT_WHILE_RECORDING : 0; }

// Memory, of bytes that are NaN in every dtype until they are written; beyond each piece a few more
// that nobody may write.
static const int INVALID = 1, GUARD = 64;
static std::mutex lock;
static std::map<char *, size_t> pieces;
static std::map<char *, Graph *> of_graphs; // allocated by them, who keep it
static Graph freed;
static size_t used, highest;
API int cuMemAllocAsync(char **to, size_t n, void *) {
    if (n == 0) return INVALID;
    if (const int error = fails()) return error;
    std::lock_guard guard(lock);
    const size_t size = (n + GUARD + 255) / 256 * 256;
    *to = static_cast<char *>(aligned_alloc(256, size));
    memset(*to, 0xff, size);
    pieces[*to] = n;
    if (recording) of_graphs[*to] = recording;
    highest = max(highest, used += n);
    return 0;
}
static void forget(char *p, size_t n) {
    for (int i = 0; i < GUARD; i++)
        if (p[n + i] != '\xff') end("written", "behind an allocation");
    memset(p, 0xff, n);
}
API int cuMemFreeAsync(char *p, void *) {
    if (recording && recorded >= FAILS_AT) return FAILED_BEFORE;
    std::lock_guard guard(lock);
    const auto piece = pieces.find(p);
    if (piece == pieces.end()) end("freed", "what was not allocated");
    const size_t n = piece->second;
    const auto of = of_graphs.find(p);
    if ((of == of_graphs.end() ? nullptr : of->second) != recording)
        end("freed", "by another graph than has allocated it");
    if (recording) return of->second = &freed, ask([=] { forget(p, n); });
    forget(p, n);
    used -= n;
    pieces.erase(piece);
    free(p);
    return 0;
}
API int cuStreamEndCapture(void *, Graph **graph) {
    const bool failed = recorded >= FAILS_AT;
    for (auto &[p, of] : of_graphs)
        if (of == recording && !failed) end("not freed", "by the graph that has allocated it");
    *graph = failed ? nullptr : recording;
    recording = nullptr;
    return failed ? FAILED_BEFORE : 0;
}
API int cuGraphInstantiateWithFlags(Graph **made, Graph *graph, uint64_t) {
    return *made = new Graph(*graph), 0;
}
API int cuGraphLaunch(const Graph *graph, void *) {
    for (const auto &work : *graph) ask(work);
    return 0;
}
API int cuGraphExecDestroy(Graph *graph) { return delete graph, 0; }
API int cuGraphDestroy(Graph *graph) { return delete graph, 0; }
API int cuDeviceGetDefaultMemPool(void **pool, int) { return *pool = HANDLE, 0; }
API int cuMemPoolSetAttribute(void *, int attribute, const uint64_t *) {
    const int USED_MEM_HIGH = 8;
    if (attribute == USED_MEM_HIGH) highest = used;
    return 0;
}
API int cuMemPoolGetAttribute(void *, int, uint64_t *value) { return *value = highest, 0; }

static void expect_inside(const char *p, size_t n, const char *what) {
    std::lock_guard guard(lock);
    auto piece = pieces.upper_bound(const_cast<char *>(p));
    if (n > 0 && (piece == pieces.begin() || p + n > (--piece, piece->first + piece->second)))
        end("beyond its memory:", what);
}
API int cuMemcpyHtoDAsync_v2(char *to, const char *from, size_t n, void *) {
    if (recording) return NOT_WHILE_RECORDING;
    expect_inside(to, n, "a copy");
    return memcpy(to, from, n), 0;
}
API int cuMemcpyDtoHAsync_v2(char *to, const char *from, size_t n, void *) {
    if (recording) return NOT_WHILE_RECORDING;
    expect_inside(from, n, "a copy");
    return memcpy(to, from, n), 0;
}
API int cuMemcpyDtoDAsync_v2(char *to, const char *from, size_t n, void *) {
    expect_inside(to, n, "a copy");
    expect_inside(from, n, "a copy");
    return ask([=] { memmove(to, from, n); });
}
API int cuMemsetD8Async(char *to, unsigned char byte, size_t n, void *) {
    expect_inside(to, n, "a fill");
    return ask([=] { memset(to, byte, n); });
}

// Kernels, all in one module.
typedef std::pair<const std::string, Kernel> Function;
API int cuModuleLoadData(void **module, const void *) {
    return *module = HANDLE, recording ? NOT_WHILE_RECORDING : 0;
}
API int cuModuleUnload(void *) { return 0; }
API int cuModuleGetFunction(Function **function, void *, const char *name) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) end("no kernel", name);
    return *function = &*found, 0;
}
API int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, void *, void **arguments,
                       void **) {
    static std::mutex one_at_a_time;
    const unsigned threads = block_x * block_y * block_z;
    if (!x || !y || !z || x > INT32_MAX || max(y, z) > 65535 || !threads || threads > 1024)
        end("a grid or block of no size that there is:", function->first);
    const std::function<void()> call = function->second(arguments);
    return ask([=] {
        std::lock_guard guard(one_at_a_time);
        launch({x, y, z}, {block_x, block_y, block_z}, shared, call);
    });
}

typedef std::chrono::steady_clock Clock;
API int cuEventCreate(Clock::time_point **event, unsigned) {
    return *event = new Clock::time_point, 0;
}
API int cuEventDestroy_v2(Clock::time_point *event) { return delete event, 0; }
API int cuEventRecord(Clock::time_point *event, void *) { return *event = Clock::now(), 0; }
API int cuEventSynchronize(void *) { return 0; }
API int cuEventElapsedTime_v2(float *ms, const Clock::time_point *a, const Clock::time_point *b) {
    return *ms = std::chrono::duration<float, std::milli>(*b - *a).count(), 0;
}

// Products: C = alpha · op(A) · op(B) + beta · C, (m, n), column by column.
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
struct Matrix {
    char *numbers;
    int type, ld;
    int64_t stride; // to the next of a batch
    size_t width() const { return type == F32 ? 4 : 2; }
    float get(size_t i) const {
        switch (type) {
        case F32: return reinterpret_cast<const float *>(numbers)[i];
        case F16: return reinterpret_cast<const __half *>(numbers)[i];
        case BF16: return reinterpret_cast<const __nv_bfloat16 *>(numbers)[i];
        }
        end("a matrix of type", std::to_string(type));
    }
    void set(size_t i, float x) const {
        switch (type) {
        case F32: reinterpret_cast<float *>(numbers)[i] = x; return;
        case F16: reinterpret_cast<__half *>(numbers)[i] = x; return;
        case BF16: reinterpret_cast<__nv_bfloat16 *>(numbers)[i] = x; return;
        }
        end("a matrix of type", std::to_string(type));
    }
    void expect(int rows, int columns) const {
        if (ld < rows) end("a leading dimension of", std::to_string(ld));
        expect_inside(numbers, ((columns - 1) * (size_t)ld + rows) * width(), "a matrix");
    }
    Matrix of_batch(int i) const { return {numbers + i * stride * width(), type, ld, stride}; }
};
static void multiply_one(bool ta, bool tb, int m, int n, int k, float alpha, float beta, Matrix a,
                         Matrix b, Matrix c, const Matrix *bias) {
    a.expect(ta ? k : m, ta ? m : k);
    b.expect(tb ? n : k, tb ? k : n);
    c.expect(m, n);
    std::vector<float> left((size_t)m * k), right((size_t)n * k); // row by row
    for (size_t i = 0; i < left.size(); i++)
        left[i] = a.get(ta ? i / k * a.ld + i % k : i % k * a.ld + i / k);
    for (size_t i = 0; i < right.size(); i++)
        right[i] = b.get(tb ? i % k * b.ld + i / k : i / k * b.ld + i % k);
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) {
            const float *x = &left[(size_t)i * k], *y = &right[(size_t)j * k];
            float sums[16] = {}, sum = 0;
            for (int l = 0; l < k; l++) sums[l % 16] += x[l] * y[l];
            for (float part : sums) sum += part;
            const size_t at = (size_t)j * c.ld + i;
            c.set(at, alpha * sum + (beta ? beta * c.get(at) : 0) + (bias ? bias->get(i) : 0));
        }
}
API int cublasCreate_v2(void **handle) { return *handle = HANDLE, 0; }
API int cublasDestroy_v2(void *) { return 0; }
API int cublasSetStream_v2(void *, void *) { return 0; }
API int cublasSetMathMode(void *, int) { return 0; }
API int cublasGemmStridedBatchedEx(void *, int ta, int tb, int m, int n, int k, const float *alpha,
                                   char *a, int a_type, int lda, long long a_stride, char *b,
                                   int b_type, int ldb, long long b_stride, const float *beta,
                                   char *c, int c_type, int ldc, long long c_stride, int batch,
                                   int compute, int) {
    const int IN_F32 = 68;
    if (compute != IN_F32) end("a product computed in", std::to_string(compute));
    const Matrix A{a, a_type, lda, a_stride}, B{b, b_type, ldb, b_stride}, C{c, c_type, ldc, c_stride};
    return ask([=, alpha = *alpha, beta = *beta] {
        for (int i = 0; i < batch; i++)
            multiply_one(ta, tb, m, n, k, alpha, beta, A.of_batch(i), B.of_batch(i), C.of_batch(i),
                         nullptr);
    });
}

// cublasLt, of one product with a bias or without.
struct LtLayout {
    int type;
    uint64_t rows, columns;
    int64_t ld;
};
struct LtProduct {
    int ta = 0, epilogue = 1;
    char *bias = nullptr;
};
API int cublasLtCreate(void **handle) { return *handle = HANDLE, 0; }
API int cublasLtDestroy(void *) { return 0; }
API int cublasLtMatrixLayoutCreate(LtLayout **layout, int type, uint64_t rows, uint64_t columns,
                                   int64_t ld) {
    return *layout = new LtLayout{type, rows, columns, ld}, 0;
}
API int cublasLtMatrixLayoutDestroy(LtLayout *layout) { return delete layout, 0; }
API int cublasLtMatmulDescCreate(LtProduct **product, int, int) {
    return *product = new LtProduct, 0;
}
API int cublasLtMatmulDescDestroy(LtProduct *product) { return delete product, 0; }
API int cublasLtMatmulDescSetAttribute(LtProduct *product, int attribute, const void *value,
                                       size_t size) {
    const size_t of_value = attribute == 8 ? 8 : 4;
    if (size != of_value) end("an attribute of bytes:", std::to_string(size));
    switch (attribute) {
    case 3: product->ta = *static_cast<const int *>(value); return 0;
    case 7: product->epilogue = *static_cast<const int *>(value); return 0;
    case 8: product->bias = *static_cast<char *const *>(value); return 0;
    }
    end("a product's attribute", std::to_string(attribute));
}
API int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = HANDLE, 0; }
API int cublasLtMatmulPreferenceDestroy(void *) { return 0; }
API int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *, const LtProduct *product, void *, void *, void *,
                                       void *, void *, int, char *found, int *n) {
    const int OF_A_RESULT = 96;
    memset(found, 0, OF_A_RESULT);
    return *n = 1, 0;
}
API int cublasLtMatmul(void *, const LtProduct *product, const float *alpha, char *a,
                       const LtLayout *of_a, char *b, const LtLayout *of_b, const float *beta,
                       char *, const LtLayout *, char *d, const LtLayout *of_d, const void *,
                       char *workspace, size_t bytes, void *) {
    const int NONE = 1, BIAS = 4;
    const uint64_t m = of_d->rows, n = of_d->columns, k = product->ta ? of_a->rows : of_a->columns;
    const LtLayout left{0, product->ta ? k : m, product->ta ? m : k, 0};
    if (of_a->rows != left.rows || of_a->columns != left.columns || of_b->rows != k ||
        of_b->columns != n)
        end("factors that do not fit", "in cublasLt");
    if (product->epilogue != NONE && product->epilogue != BIAS)
        end("an epilogue of number", std::to_string(product->epilogue));
    for (const char *p : {a, b, d, workspace})
        if ((size_t)p % 256) end("a pointer that is not aligned", "in cublasLt");
    expect_inside(workspace, bytes, "a workspace");
    const Matrix bias{product->bias, of_d->type, 0, 0};
    if (product->epilogue == BIAS) expect_inside(bias.numbers, m * bias.width(), "a bias");
    const Matrix A{a, of_a->type, (int)of_a->ld, 0}, B{b, of_b->type, (int)of_b->ld, 0},
        C{d, of_d->type, (int)of_d->ld, 0};
    const bool ta = product->ta, biased = product->epilogue == BIAS;
    return ask([=, alpha = *alpha, beta = *beta] {
        multiply_one(ta, false, m, n, k, alpha, beta, A, B, C, biased ? &bias : nullptr);
    });
}

// Made when a device is; nobody here draws numbers on a GPU.
API int curandCreateGenerator(void **generator, int) { return *generator = HANDLE, 0; }
API int curandDestroyGenerator(void *) { return 0; }
API int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }
API int curandSetStream(void *, void *) { return 0; }

API int not_here(const char *name) { end("no function", name); }
