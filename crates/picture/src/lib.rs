//! Attention weights as a picture: small images of all heads, and the chosen heads enlarged with
//! their tokens and with weights in tooltips. The SVG has no scripts and no external resources.
//!
//! # Examples
//! ```
//! use encoder::{AttentionReader, LoadOptions};
//! use picture::{HeadChoice, choose, document};
//!
//! let dir = "../../weights/all-MiniLM-L6-v2";
//! let reader = AttentionReader::from_dir(dir, &LoadOptions::default())?;
//! let attention = reader.read("I love AI", None)?.remove(0);
//! let chosen = choose(&attention, Some(1), HeadChoice::One(8))?;
//! assert!((chosen[0].rows[1][2] - 0.87).abs() < 0.01); // from "i" to "love"
//! assert!(document("I love AI", &attention, &chosen)?.starts_with("<svg"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod colour;
mod error;
mod heat_map;
mod image;
mod matrix;
mod svg;
mod text;

pub use colour::colour;
pub use error::{Error, Result};
pub use matrix::{HeadChoice, Matrix, all_heads, choose, top_keys};
pub use svg::{POINTER_HINT, document, html_page};
