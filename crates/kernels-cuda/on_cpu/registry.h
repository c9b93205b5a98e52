// The registry of kernels by name. A `Kernel` takes pointers to the arguments, as CUDA's driver
// receives them, and returns a function that calls the kernel with copies of the arguments.
#pragma once
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

typedef std::function<std::function<void()>(void **)> Kernel;
void add_kernel(const char *name, Kernel kernel);

struct Register {
    template <typename... A> Register(const char *name, void (*kernel)(A...)) {
        add_kernel(name, [=](void **p) { return call(kernel, p, std::index_sequence_for<A...>()); });
    }
    template <typename... A, size_t... I>
    static std::function<void()> call(void (*kernel)(A...), void **p, std::index_sequence<I...>) {
        const std::tuple<std::remove_const_t<A>...> arguments(
            *static_cast<std::remove_const_t<A> *>(p[I])...);
        return [=] { std::apply(kernel, arguments); };
    }
};
