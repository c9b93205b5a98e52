// Emulates the functions of CUDA's driver, cuBLAS, cublasLt and cuRAND that the program calls, on a
// CPU. Memory is on the heap, all calls are synchronous, and kernels are those that `build.py`
// registers under their names. A call that a driver would refuse returns an error or ends the
// program with a message. A call that would corrupt memory on a GPU ends the program.
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

[[noreturn]] static void fail(const char *what, const std::string &detail) {
    fprintf(stderr, "CUDA emulator: %s %s\n", what, detail.c_str());
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
static int describe(const char **text, int error) {
    static thread_local std::string message;
    message = "error " + std::to_string(error) + " of the CUDA emulator";
    return *text = message.c_str(), 0;
}
API int cuGetErrorName(int error, const char **text) { return describe(text, error); }
API int cuGetErrorString(int error, const char **text) { return describe(text, error); }

// The work of a stream: it runs at once, or is captured and runs whenever the graph is launched.
typedef std::vector<std::function<void()>> Graph;
static thread_local Graph *capture;
static const int CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901;
// For tests: the number of the call at which a capture fails. All later calls of the capture fail
// too.
static const int FAILS_AT = getenv("GPU_FAILS_AT") ? atoi(getenv("GPU_FAILS_AT")) : INT32_MAX;
static thread_local int captured_calls;
static int capture_error() {
    if (!capture || ++captured_calls < FAILS_AT) return 0;
    return captured_calls == FAILS_AT ? CAPTURE_UNSUPPORTED : CAPTURE_INVALIDATED;
}
static int enqueue(std::function<void()> work) {
    if (const int error = capture_error()) return error;
    if (capture)
        capture->push_back(work);
    else
        work();
    return 0;
}
API int cuStreamIsCapturing(void *, int *status) { return *status = capture != nullptr, 0; }
API int cuStreamBeginCapture_v2(void *, int) {
    return captured_calls = 0, capture = new Graph, 0;
}
API int cuStreamSynchronize(void *) { return capture ? CAPTURE_UNSUPPORTED : 0; }

// Memory. Fresh bytes are 0xff, which is NaN in every float dtype. Guard bytes after each
// allocation detect writes beyond its end.
static const int INVALID = 1, GUARD = 64;
static std::mutex lock;
static std::map<char *, size_t> allocations;
// The graph that allocated the memory, or `freed` after the graph has freed it.
static std::map<char *, Graph *> owners;
static Graph freed;
static size_t used, highest;
API int cuMemAllocAsync(char **to, size_t n, void *) {
    if (n == 0) return INVALID;
    if (const int error = capture_error()) return error;
    std::lock_guard guard(lock);
    const size_t size = (n + GUARD + 255) / 256 * 256;
    *to = static_cast<char *>(aligned_alloc(256, size));
    memset(*to, 0xff, size);
    allocations[*to] = n;
    if (capture) owners[*to] = capture;
    highest = max(highest, used += n);
    return 0;
}
static void check_and_poison(char *p, size_t n) {
    for (int i = 0; i < GUARD; i++)
        if (p[n + i] != '\xff') fail("a write", "beyond the end of an allocation");
    memset(p, 0xff, n);
}
API int cuMemFreeAsync(char *p, void *) {
    if (capture && captured_calls >= FAILS_AT) return CAPTURE_INVALIDATED;
    std::lock_guard guard(lock);
    const auto allocation = allocations.find(p);
    if (allocation == allocations.end()) fail("a free", "of memory that is not allocated");
    const size_t n = allocation->second;
    const auto owner = owners.find(p);
    if ((owner == owners.end() ? nullptr : owner->second) != capture)
        fail("a free", "and its allocation must be in one graph, or both outside graphs");
    if (capture) return owner->second = &freed, enqueue([=] { check_and_poison(p, n); });
    check_and_poison(p, n);
    used -= n;
    allocations.erase(allocation);
    free(p);
    return 0;
}
API int cuStreamEndCapture(void *, Graph **graph) {
    const bool failed = captured_calls >= FAILS_AT;
    for (auto &[p, owner] : owners)
        if (owner == capture && !failed) fail("memory not freed", "by the graph that allocated it");
    *graph = failed ? nullptr : capture;
    capture = nullptr;
    return failed ? CAPTURE_INVALIDATED : 0;
}
API int cuGraphInstantiateWithFlags(Graph **made, Graph *graph, uint64_t) {
    return *made = new Graph(*graph), 0;
}
API int cuGraphLaunch(const Graph *graph, void *) {
    for (const auto &work : *graph) enqueue(work);
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

static void check_range(const char *p, size_t n, const char *what) {
    std::lock_guard guard(lock);
    auto allocation = allocations.upper_bound(const_cast<char *>(p));
    if (n > 0 && (allocation == allocations.begin() ||
                  p + n > (--allocation, allocation->first + allocation->second)))
        fail("access outside of an allocation:", what);
}
API int cuMemcpyHtoDAsync_v2(char *to, const char *from, size_t n, void *) {
    if (capture) return CAPTURE_UNSUPPORTED;
    check_range(to, n, "a copy");
    return memcpy(to, from, n), 0;
}
API int cuMemcpyDtoHAsync_v2(char *to, const char *from, size_t n, void *) {
    if (capture) return CAPTURE_UNSUPPORTED;
    check_range(from, n, "a copy");
    return memcpy(to, from, n), 0;
}
API int cuMemcpyDtoDAsync_v2(char *to, const char *from, size_t n, void *) {
    check_range(to, n, "a copy");
    check_range(from, n, "a copy");
    return enqueue([=] { memmove(to, from, n); });
}
API int cuMemsetD8Async(char *to, unsigned char byte, size_t n, void *) {
    check_range(to, n, "a fill");
    return enqueue([=] { memset(to, byte, n); });
}

// Kernels, all in one module.
typedef std::pair<const std::string, Kernel> Function;
API int cuModuleLoadData(void **module, const void *) {
    return *module = HANDLE, capture ? CAPTURE_UNSUPPORTED : 0;
}
API int cuModuleUnload(void *) { return 0; }
API int cuModuleGetFunction(Function **function, void *, const char *name) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) fail("unknown kernel", name);
    return *function = &*found, 0;
}
// The largest dynamic shared memory of each kernel. More than 48 KiB must be requested.
static std::map<std::string, unsigned> &dynamic_limits() {
    static std::map<std::string, unsigned> all;
    return all;
}
API int cuFuncSetAttribute(Function *function, int attribute, int value) {
    const int MAX_DYNAMIC_SHARED = 8, MOST = 99 << 10; // of compute capability 8.6
    if (attribute != MAX_DYNAMIC_SHARED) fail("unsupported attribute of", function->first);
    if (value > MOST) return INVALID;
    std::lock_guard guard(lock);
    return dynamic_limits()[function->first] = value, 0;
}
API int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, void *, void **arguments,
                       void **) {
    static std::mutex one_at_a_time;
    const unsigned threads = block_x * block_y * block_z;
    if (!x || !y || !z || x > INT32_MAX || max(y, z) > 65535 || !threads || threads > 1024)
        fail("invalid grid or block size:", function->first);
    if (shared > 48 << 10) {
        std::lock_guard guard(lock);
        if (shared > dynamic_limits()[function->first])
            fail("too much dynamic shared memory:", function->first);
    }
    const std::function<void()> call = function->second(arguments);
    return enqueue([=] {
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

// Matrix products: C = alpha · op(A) · op(B) + beta · C, where C is (m, n), column-major.
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
struct Matrix {
    char *data;
    int type, ld;
    int64_t stride; // from one matrix of a batch to the next, in elements
    size_t element_size() const { return type == F32 ? 4 : 2; }
    float get(size_t i) const {
        switch (type) {
        case F32: return reinterpret_cast<const float *>(data)[i];
        case F16: return reinterpret_cast<const __half *>(data)[i];
        case BF16: return reinterpret_cast<const __nv_bfloat16 *>(data)[i];
        }
        fail("unsupported matrix type", std::to_string(type));
    }
    void set(size_t i, float x) const {
        switch (type) {
        case F32: reinterpret_cast<float *>(data)[i] = x; return;
        case F16: reinterpret_cast<__half *>(data)[i] = x; return;
        case BF16: reinterpret_cast<__nv_bfloat16 *>(data)[i] = x; return;
        }
        fail("unsupported matrix type", std::to_string(type));
    }
    void expect(int rows, int columns) const {
        if (ld < rows) fail("invalid leading dimension", std::to_string(ld));
        check_range(data, ((columns - 1) * (size_t)ld + rows) * element_size(), "a matrix");
    }
    Matrix of_batch(int i) const { return {data + i * stride * element_size(), type, ld, stride}; }
};
static void multiply_one(bool ta, bool tb, int m, int n, int k, float alpha, float beta, Matrix a,
                         Matrix b, Matrix c, const Matrix *bias) {
    a.expect(ta ? k : m, ta ? m : k);
    b.expect(tb ? n : k, tb ? k : n);
    c.expect(m, n);
    std::vector<float> left((size_t)m * k), right((size_t)n * k); // row-major
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
    if (compute != IN_F32) fail("unsupported compute type", std::to_string(compute));
    const Matrix A{a, a_type, lda, a_stride}, B{b, b_type, ldb, b_stride}, C{c, c_type, ldc, c_stride};
    return enqueue([=, alpha = *alpha, beta = *beta] {
        for (int i = 0; i < batch; i++)
            multiply_one(ta, tb, m, n, k, alpha, beta, A.of_batch(i), B.of_batch(i), C.of_batch(i),
                         nullptr);
    });
}

// cublasLt: a product with or without bias.
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
    const size_t expected = attribute == 8 ? 8 : 4;
    if (size != expected) fail("invalid attribute size:", std::to_string(size));
    switch (attribute) {
    case 3: product->ta = *static_cast<const int *>(value); return 0;
    case 7: product->epilogue = *static_cast<const int *>(value); return 0;
    case 8: product->bias = *static_cast<char *const *>(value); return 0;
    }
    fail("unsupported product attribute", std::to_string(attribute));
}
API int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = HANDLE, 0; }
API int cublasLtMatmulPreferenceDestroy(void *) { return 0; }
API int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *, const LtProduct *product, void *, void *, void *,
                                       void *, void *, int, char *found, int *n) {
    const int RESULT_SIZE = 96;
    memset(found, 0, RESULT_SIZE);
    return *n = 1, 0;
}
API int cublasLtMatmul(void *, const LtProduct *product, const float *alpha, char *a,
                       const LtLayout *a_layout, char *b, const LtLayout *b_layout, const float *beta,
                       char *, const LtLayout *, char *d, const LtLayout *d_layout, const void *,
                       char *workspace, size_t bytes, void *) {
    const int NONE = 1, BIAS = 4;
    const uint64_t m = d_layout->rows, n = d_layout->columns;
    const uint64_t k = product->ta ? a_layout->rows : a_layout->columns;
    const LtLayout left{0, product->ta ? k : m, product->ta ? m : k, 0};
    if (a_layout->rows != left.rows || a_layout->columns != left.columns || b_layout->rows != k ||
        b_layout->columns != n)
        fail("matrix sizes do not match", "in cublasLt");
    if (product->epilogue != NONE && product->epilogue != BIAS)
        fail("unsupported epilogue", std::to_string(product->epilogue));
    for (const char *p : {a, b, d, workspace})
        if ((size_t)p % 256) fail("unaligned pointer", "in cublasLt");
    check_range(workspace, bytes, "a workspace");
    const Matrix bias{product->bias, d_layout->type, 0, 0};
    if (product->epilogue == BIAS) check_range(bias.data, m * bias.element_size(), "a bias");
    const Matrix A{a, a_layout->type, (int)a_layout->ld, 0},
        B{b, b_layout->type, (int)b_layout->ld, 0}, C{d, d_layout->type, (int)d_layout->ld, 0};
    const bool ta = product->ta, has_bias = product->epilogue == BIAS;
    return enqueue([=, alpha = *alpha, beta = *beta] {
        multiply_one(ta, false, m, n, k, alpha, beta, A, B, C, has_bias ? &bias : nullptr);
    });
}

// candle creates a generator with each device. The program never uses it.
API int curandCreateGenerator(void **generator, int) { return *generator = HANDLE, 0; }
API int curandDestroyGenerator(void *) { return 0; }
API int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }
API int curandSetStream(void *, void *) { return 0; }

API int unsupported(const char *name) { fail("unsupported function", name); }
