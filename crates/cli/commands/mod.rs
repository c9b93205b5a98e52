//! One file per command, with the command's arguments and output; `tasks.rs` has the commands of all
//! tasks. `completions` and `man` are in
//! `main.rs`.

pub mod attention;
pub mod cache;
pub mod compare;
pub mod embed;
pub mod inspect;
pub mod rerank;
pub mod search;
#[cfg(all(feature = "serve", unix))]
pub mod serve;
pub mod similarity;
pub mod tasks;
