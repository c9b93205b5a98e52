# `just --list` prints the recipes. Every recipe is also a command that can be run without just.

_list:
    @just --list

# Everything that must pass (.ci/run)
check:
    .ci/run

# All tests, on the best instruction set of the CPU
test *arguments:
    cargo test --release {{arguments}}

# Formatting, lints and documentation links
lint:
    cargo fmt --all --check
    cargo clippy --release --all-targets --workspace -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --document-private-items

# The Python package, in the virtual environment target/python; `just python -m packaging`
python *arguments:
    python3 -m venv target/python
    target/python/bin/pip install --quiet './python[test]'
    target/python/bin/pytest python {{arguments}}

# The server: real clients, hostile input, faults
server *arguments:
    cargo build --release
    python3 -m venv target/server
    target/server/bin/pip install --quiet -r tests/server/requirements.txt
    target/server/bin/pytest tests/server {{arguments}}

# The CUDA code without a GPU; MODE is empty, clippy or tests
cuda-check *mode:
    scripts/cuda-check {{mode}}

# The CPU kernels inline every intrinsic
check-inlining:
    scripts/check-inlining

# No dependency needs a newer Rust than the workspace
check-msrv:
    scripts/check-msrv

# The kernels' unsafe code under AddressSanitizer and Miri (nightly Rust)
sanitize:
    scripts/sanitize

# The parsers, SECONDS for each (nightly Rust, cargo-fuzz)
fuzz seconds="300":
    scripts/fuzz {{seconds}}

# The command beside the Python libraries on random models and tables
oracle:
    cargo build --release
    python3 tests/oracle.py
    python3 tests/tables.py

# The golden files, from PyTorch and transformers (tests/golden/requirements.txt)
golden:
    python3 tests/golden/generate.py
    python3 tests/golden/architectures.py
    python3 tests/golden/decoders.py
    python3 tests/golden/decoder_texts.py

# The weights of the default model (weights/requirements.txt)
weights:
    python3 weights/prepare.py

# Benchmarks: kernels or models
bench name:
    cargo bench -p encodle-benches --bench {{name}}

# This project beside other libraries; appends to benches/results/
peers *arguments:
    python3 benches/peers/run.py {{arguments}}

# What RELEASE.md publishes, without publishing it
package:
    cargo publish --workspace --dry-run --locked
    maturin build --release --locked --manifest-path python/Cargo.toml --out target/dist
    maturin sdist --manifest-path python/Cargo.toml --out target/dist
