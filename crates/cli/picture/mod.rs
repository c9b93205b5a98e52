//! Attention weights as a picture: small images of all heads, and the chosen heads enlarged with
//! their tokens and the weight of each cell in a tooltip. The SVG has no scripts and no external
//! resources.

pub mod colour;
mod heat_map;
mod image;
pub mod png;
pub mod svg;
mod text;
