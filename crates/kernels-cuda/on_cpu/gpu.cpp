// Runs the threads of a block as fibers of one CPU thread. Each fiber has its own stack.
#include "gpu.h"

#include <cstdio>
#include <cstdlib>

// Compile this file without sanitizer. If the other files are compiled with ThreadSanitizer or
// AddressSanitizer, define SANITIZER_thread or SANITIZER_address: ThreadSanitizer then treats
// fibers as threads and finds accesses to shared memory that no barrier separates, and
// AddressSanitizer accepts that a stack is used again.
#if defined(SANITIZER_thread)
#include <sanitizer/tsan_interface.h>
#elif defined(SANITIZER_address)
#include <sanitizer/asan_interface.h>
#endif

Dim threadIdx, blockIdx, blockDim, gridDim;
char *dynamic_shared;

namespace {
enum State { READY, AT_BLOCK, AT_WARP, DONE };
const int MAX_THREADS = 1024, STACK = 128 << 10;

struct Fiber {
    char *stack = nullptr;
    void *sp = nullptr;
    State state = DONE;
    Dim index;
    CopyGroups copies;
    void *handle = nullptr; // the sanitizer's handle of this fiber
} fibers[MAX_THREADS];

int threads, current;
void *scheduler;
const std::function<void()> *body;
// The addresses of these variables identify the barriers. `launch_barrier` tells ThreadSanitizer
// that the threads of a block start after `launch` has prepared the block, and end before `launch`
// continues.
char launch_barrier, block_barrier, warp_barriers[MAX_THREADS / 32];

#if defined(SANITIZER_thread)
void *scheduler_handle;
void release_barrier(void *barrier) { __tsan_release(barrier); }
void acquire_barrier(void *barrier) { __tsan_acquire(barrier); }
void notify_switch(void *handle) { __tsan_switch_to_fiber(handle, __tsan_switch_to_fiber_no_sync); }
#else
void *const scheduler_handle = nullptr;
void release_barrier(void *) {}
void acquire_barrier(void *) {}
void notify_switch(void *) {}
#endif
} // namespace

// Saves the callee-saved registers and continues on the other stack.
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
    notify_switch(scheduler_handle);
    switch_stack(&fibers[current].sp, scheduler);
}

static void run() {
    acquire_barrier(&launch_barrier);
    (*body)();
    release_barrier(&launch_barrier);
    yield(DONE);
    abort();
}

static void start(int i) {
    Fiber &fiber = fibers[i];
    if (!fiber.stack) fiber.stack = static_cast<char *>(aligned_alloc(64, STACK));
#if defined(SANITIZER_address)
    __asan_unpoison_memory_region(fiber.stack, STACK);
#elif defined(SANITIZER_thread)
    fiber.handle = __tsan_create_fiber(0);
#endif
    void **sp = reinterpret_cast<void **>(fiber.stack + STACK - 64);
    *--sp = nullptr; // the return address of `run`, which does not return
    *--sp = reinterpret_cast<void *>(run);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    fiber.sp = sp;
    fiber.state = READY;
    fiber.copies.clear();
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

static void resume(int i) {
    current = i;
    threadIdx = fibers[i].index;
    notify_switch(fibers[i].handle);
    switch_stack(&scheduler, fibers[i].sp);
#if defined(SANITIZER_thread)
    if (fibers[i].state == DONE) __tsan_destroy_fiber(fibers[i].handle);
#endif
}

// Makes the fibers in [from, to) ready again if all of them are done or wait at the same barrier.
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
    // Alternate the order of the threads, since a GPU guarantees no order.
    for (bool backwards = false;; backwards = !backwards) {
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
            fprintf(stderr, "deadlock: the threads of a block wait at different barriers\n");
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
#if defined(SANITIZER_thread)
    scheduler_handle = __tsan_get_current_fiber();
#endif
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                release_barrier(&launch_barrier);
                run_block();
                acquire_barrier(&launch_barrier);
            }
    free(dynamic_shared);
}

void __syncthreads() {
    release_barrier(&block_barrier);
    yield(AT_BLOCK);
    acquire_barrier(&block_barrier);
}
void __syncwarp() {
    char *warp = &warp_barriers[warp_of_block()];
    release_barrier(warp);
    yield(AT_WARP);
    acquire_barrier(warp);
}
CopyGroups &copy_groups_of_thread() { return fibers[current].copies; }
int warp_of_block() { return current / 32; }
int lane_of_warp() { return current % 32; }
