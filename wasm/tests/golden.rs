//! The golden tests of the workspace, for `scripts/wasm-check`. `cargo test` runs them as a part of
//! the integration tests.

#[path = "../../tests/golden.rs"]
mod golden;
#[path = "../../tests/golden_architectures.rs"]
mod golden_architectures;
#[path = "../../tests/golden_attention.rs"]
mod golden_attention;
#[path = "../../tests/golden_bge_m3.rs"]
mod golden_bge_m3;
#[path = "../../tests/golden_decoder.rs"]
mod golden_decoder;
#[path = "../../tests/golden_decoders.rs"]
mod golden_decoders;
#[path = "../../tests/golden_heads.rs"]
mod golden_heads;
#[path = "../../tests/golden_multi_vector.rs"]
mod golden_multi_vector;
#[path = "../../tests/golden_sentence.rs"]
mod golden_sentence;
#[path = "../../tests/golden_sparse.rs"]
mod golden_sparse;
#[path = "../../tests/golden_static.rs"]
mod golden_static;
#[path = "../../tests/support.rs"]
#[expect(dead_code, reason = "other integration tests use the rest")]
mod support;
