//! Attention weights as a table on the terminal, and as CSV and JSON. The crate [`picture`] draws
//! SVG and HTML pictures; [`png`] converts SVG to PNG.

pub mod export;
pub mod png;
pub mod terminal;
