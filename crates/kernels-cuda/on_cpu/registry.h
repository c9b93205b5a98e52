// Kernels by their names, called with pointers to their arguments as CUDA's driver is given them.
#pragma once
#include <functional>
#include <type_traits>
#include <utility>

typedef std::function<void(void **)> Kernel;
void add_kernel(const char *name, Kernel kernel);

struct Register {
    template <typename... A> Register(const char *name, void (*kernel)(A...)) {
        add_kernel(name, [=](void **p) { call(kernel, p, std::index_sequence_for<A...>()); });
    }
    template <typename... A, size_t... I>
    static void call(void (*kernel)(A...), void **p, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<A> *>(p[I])...);
    }
};
