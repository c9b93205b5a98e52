//! One file per command, with the command's arguments and output. `completions` and `man` are in
//! `main.rs`.

pub mod answer;
pub mod attention;
pub mod cache;
pub mod classify;
pub mod compare;
pub mod embed;
pub mod fill_mask;
pub mod inspect;
pub mod rerank;
pub mod search;
#[cfg(all(feature = "serve", unix))]
pub mod serve;
pub mod similarity;
pub mod tag;
