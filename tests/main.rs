//! The integration tests, which need several crates or golden files made with other libraries. All
//! are in one binary, because linking one binary per file would take longer.

mod bert_base;
mod cli;
mod conformance;
mod corpora;
#[cfg(feature = "cuda")]
mod cuda;
mod damaged;
mod golden;
mod golden_architectures;
mod golden_attention;
mod golden_bge_m3;
mod golden_decoder;
mod golden_decoders;
mod golden_heads;
mod golden_multi_vector;
mod golden_sentence;
mod golden_sparse;
mod golden_static;
#[cfg(feature = "hub")]
mod hub;
mod invariance;
mod layouts;
mod loading;
mod packed_cache;
mod properties;
mod random_tensors;
mod reference;
mod search;
#[cfg(all(feature = "serve", unix))]
mod serve;
mod settings;
mod support;
