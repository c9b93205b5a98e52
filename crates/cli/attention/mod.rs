//! Attention weights on the terminal, as numbers in files, and as PNG. Pictures are in the crate
//! [`picture`].

pub mod export;
pub mod png;
pub mod terminal;
