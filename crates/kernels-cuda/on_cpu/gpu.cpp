// A block's threads as fibers of one thread of the CPU's, each with a stack of its own.
#include "gpu.h"

#include <cstdio>
#include <cstdlib>

// The sanitizers must be told of fibers, by CHECKED_thread or CHECKED_address, and not check this file.
// That of threads sees each as a thread, and so finds shared memory that is read and written without
// a barrier between.
#if defined(CHECKED_thread)
#include <sanitizer/tsan_interface.h>
#elif defined(CHECKED_address)
#include <sanitizer/asan_interface.h>
#endif

Dim threadIdx, blockIdx, blockDim, gridDim;
char *dynamic_shared;

namespace {
enum State { READY, AT_BLOCK, AT_WARP, DONE };
const int MOST = 1024, STACK = 128 << 10;

struct Fiber {
    char *stack = nullptr;
    void *sp = nullptr;
    State state = DONE;
    Dim index;
    void *known = nullptr; // to the sanitizer
} fibers[MOST];

int threads, current;
void *scheduler;
const std::function<void()> *body;
char of_block, of_warp[MOST / 32]; // what stands for the barriers

#if defined(CHECKED_thread)
void *known_scheduler;
void happened(void *barrier) { __tsan_release(barrier); }
void happens_after(void *barrier) { __tsan_acquire(barrier); }
void go_to(void *known) { __tsan_switch_to_fiber(known, __tsan_switch_to_fiber_no_sync); }
#else
void *const known_scheduler = nullptr;
void happened(void *) {}
void happens_after(void *) {}
void go_to(void *) {}
#endif
} // namespace

// Saves what a function must, and goes on where the other stack has left off.
asm(R"(
.text
.type switch_stack, @function
switch_stack:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
extern "C" __attribute__((visibility("hidden"))) void switch_stack(void **from, void *to);

static void yield(State state) {
    fibers[current].state = state;
    go_to(known_scheduler);
    switch_stack(&fibers[current].sp, scheduler);
}

static void run() {
    happens_after(&threads);
    (*body)();
    happened(&threads);
    yield(DONE);
    abort();
}

static void start(int i) {
    Fiber &fiber = fibers[i];
    if (!fiber.stack) fiber.stack = static_cast<char *>(aligned_alloc(64, STACK));
#if defined(CHECKED_address)
    __asan_unpoison_memory_region(fiber.stack, STACK);
#elif defined(CHECKED_thread)
    fiber.known = __tsan_create_fiber(0);
#endif
    void **sp = reinterpret_cast<void **>(fiber.stack + STACK - 64);
    *--sp = nullptr; // where `run` would return to
    *--sp = reinterpret_cast<void *>(run);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    fiber.sp = sp;
    fiber.state = READY;
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

static void resume(int i) {
    current = i;
    threadIdx = fibers[i].index;
    go_to(fibers[i].known);
    switch_stack(&scheduler, fibers[i].sp);
#if defined(CHECKED_thread)
    if (fibers[i].state == DONE) __tsan_destroy_fiber(fibers[i].known);
#endif
}

// Those of [from, to) that are left go on, if all of them wait for each other.
static bool release(int from, int to, State waiting) {
    bool any = false;
    for (int i = from; i < to; i++) {
        if (fibers[i].state != DONE && fibers[i].state != waiting) return false;
        any |= fibers[i].state == waiting;
    }
    for (int i = from; i < to; i++)
        if (fibers[i].state == waiting) fibers[i].state = READY;
    return any;
}

static void run_block() {
    for (int i = 0; i < threads; i++) start(i);
    for (bool backwards = false;; backwards = !backwards) { // no order is to be relied on
        int left = 0;
        for (int turn = 0; turn < threads; turn++) {
            const int i = backwards ? threads - 1 - turn : turn;
            if (fibers[i].state == READY) resume(i);
            left += fibers[i].state != DONE;
        }
        if (left == 0) return;
        bool released = release(0, threads, AT_BLOCK);
        for (int i = 0; i < threads; i += 32) released |= release(i, min(i + 32, threads), AT_WARP);
        if (!released) {
            fprintf(stderr, "a block's threads wait at different places, for ever\n");
            abort();
        }
    }
}

void launch(Dim grid, Dim block, size_t shared, const std::function<void()> &kernel) {
    gridDim = grid;
    blockDim = block;
    threads = block.x * block.y * block.z;
    body = &kernel;
    dynamic_shared = static_cast<char *>(malloc(shared + 1));
#if defined(CHECKED_thread)
    known_scheduler = __tsan_get_current_fiber();
#endif
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                happened(&threads);
                run_block();
                happens_after(&threads);
            }
    free(dynamic_shared);
}

void __syncthreads() {
    happened(&of_block);
    yield(AT_BLOCK);
    happens_after(&of_block);
}
void __syncwarp() {
    char *warp = &of_warp[warp_of_block()];
    happened(warp);
    yield(AT_WARP);
    happens_after(warp);
}
int warp_of_block() { return current / 32; }
int lane_of_warp() { return current % 32; }
