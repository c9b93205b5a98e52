//! Attention weights as matrices, on the terminal and as numbers in files. Pictures are in
//! [`crate::picture`].

pub mod export;
pub mod matrix;
pub mod terminal;
