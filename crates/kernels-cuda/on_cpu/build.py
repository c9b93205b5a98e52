"""Builds an emulator of CUDA's libraries that runs our kernels and candle's on the CPU.

    python build.py OUT

deletes the folder OUT, and writes OUT/lib64/libcuda.so and the other CUDA libraries, which are all
the same file. Programs with the feature `cuda` are linked with them (CUDA_PATH=OUT) and run with
them (LD_LIBRARY_PATH=OUT/lib64).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = "-std=c++20 -O3 -mf16c -mavx2 -mfma -fPIC -fno-strict-aliasing -fvisibility=hidden -w".split()
# Macros that candle's kernels test.
CUDA_MACROS = "-D__CUDA_ARCH__=800 -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0".split()
CANDLE_KERNELS = "affine binary cast fill indexing reduce sort ternary unary".split()
HEADERS = "cuda.h cuda_bf16.h cuda_fp16.h cuda_fp8.h".split()
LIMITS = "#include <limits>\nnamespace cuda::std { using ::std::numeric_limits; }\n"
LIBRARIES = "cuda cudart cublas cublasLt curand nvrtc".split()


def sources(package):
    """The source folder of a package in Cargo.lock."""
    command = "cargo metadata --format-version 1 --features cuda".split()
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    packages = json.loads(subprocess.check_output(command, cwd=HERE.parent.parent.parent))["packages"]
    return next(Path(p["manifest_path"]).parent / "src" for p in packages if p["name"] == package)


def run_all(commands):
    """Runs compiler commands in parallel; exits if one fails."""
    running = [subprocess.Popen(command) for command in commands]
    if any([process.wait() for process in running]):
        sys.exit("the CUDA emulator does not compile")


def main():
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    (out / "include/cuda/std").mkdir(parents=True)
    (out / "lib64").mkdir()
    for header in HEADERS:
        (out / "include" / header).write_text('#include "gpu.h"\n')
    (out / "include/cuda/std/limits").write_text(LIMITS)
    candle, ours = sources("candle-kernels"), HERE.parent / "cuda"

    kernels = [candle / f"{name}.cu" for name in CANDLE_KERNELS] + sorted(ours.glob("*.cu"))
    commands = []
    for source in kernels:
        flags = [*FLAGS, *CUDA_MACROS, f"-I{out}/include", f"-I{HERE}", f"-I{source.parent}"]
        unit = out / f"{source.parent.name}_{source.stem}.cpp"
        # C++ has no arrays whose size is set at launch: replace them by pointers.
        array = r"extern __shared__ (\w+) (\w+)\[\];"
        text = re.sub(array, r"\1 *\2 = reinterpret_cast<\1 *>(dynamic_shared);", source.read_text())
        text = f'#include "gpu.h"\n#include "registry.h"\n#line 1 "{source}"\n{text}'
        unit.write_text(text)
        preprocessed = subprocess.check_output(["g++", *flags, "-E", unit], text=True)
        names = sorted(set(re.findall(r'extern "C"\s+void\s+(\w+)\s*\(', preprocessed)))
        lines = [f'static Register register_{name}("{name}", {name});' for name in names]
        unit.write_text("\n".join([text, *lines, ""]))
        commands.append(["g++", *flags, "-c", unit, "-o", unit.with_suffix(".o")])
    run_all(commands)

    declared = "".join(path.read_text() for path in sources("cudarc").glob("*/sys/mod.rs"))
    names = set(re.findall(r'load::<_F>\("(\w+)"\)', declared))
    names |= set(re.findall(r"pub fn (\w+)\(", (candle / "ffi.rs").read_text()))
    # Weak definitions of all functions. Those that driver.cpp does not define end the program when
    # they are called.
    stubs = 'extern "C" int unsupported(const char *);\n#define STUB extern "C" __attribute__((weak, '
    stubs += 'visibility("default"))) int\n'
    stubs += "".join(f'STUB {name}() {{ return unsupported("{name}"); }}\n' for name in sorted(names))
    (out / "stubs.cpp").write_text(stubs)
    units = [out / "stubs.cpp", HERE / "driver.cpp", HERE / "gpu.cpp"]
    objects = [out / f"{unit.stem}.o" for unit in units]
    run_all(["g++", *FLAGS, f"-I{HERE}", "-c", u, "-o", o] for u, o in zip(units, objects))
    objects += [command[-1] for command in commands]
    library = out / "lib64" / f"lib{LIBRARIES[0]}.so"
    # candle's files define some functions several times.
    link = ["g++", "-shared", "-Wl,-Bsymbolic,--allow-multiple-definition", *objects, "-o", library]
    subprocess.run(link, check=True)
    for name in LIBRARIES[1:]:
        os.link(library, library.with_name(f"lib{name}.so"))


if __name__ == "__main__":
    main()
