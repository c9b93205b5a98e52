//! One binary of tests that need more than one crate, or something that nobody here wrote.

mod bert_base;
mod cli;
mod conformance;
mod corpora;
#[cfg(feature = "cuda")]
mod cuda;
mod damaged;
mod golden;
mod golden_attention;
mod golden_decoder;
mod golden_heads;
mod golden_sentence;
#[cfg(feature = "hub")]
mod hub;
mod invariance;
mod layouts;
mod properties;
mod random_tensors;
mod settings;
mod support;
