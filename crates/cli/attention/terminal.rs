//! Attention weights as a table on the terminal.

use std::io::Write;

use anyhow::Result;
use encoder::TextAttention;

use picture::{Matrix, colour, top_keys};

use crate::fit::{fit, fit_right, terminal_width};

/// The width of the column of queries.
const QUERY: usize = 12;
/// The width of the column of a key.
const KEY: usize = 7;

/// Writes a matrix with one column per key. If the terminal is too narrow for all columns, writes
/// for each query the keys with the largest weights.
pub fn write_matrix(
    out: &mut impl Write,
    attention: &TextAttention,
    matrix: &Matrix,
    shaded: bool,
) -> Result<()> {
    writeln!(out, "{}", matrix.title)?;
    if QUERY + KEY * attention.keys.len() > terminal_width() {
        write_top_keys(out, attention, matrix)?
    } else {
        write_columns(out, attention, matrix, shaded)?
    }
    Ok(writeln!(out)?)
}

fn write_top_keys(out: &mut impl Write, attention: &TextAttention, matrix: &Matrix) -> Result<()> {
    let TextAttention { queries, keys, .. } = attention;
    for (token, row) in queries.iter().zip(&matrix.rows) {
        write!(out, "{} ", fit(token, QUERY - 1))?;
        for key in top_keys(row) {
            write!(out, "  {} {:.2}", fit(&keys[key], QUERY - 1).trim_end(), row[key])?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_columns(
    out: &mut impl Write,
    attention: &TextAttention,
    matrix: &Matrix,
    shaded: bool,
) -> Result<()> {
    let TextAttention { queries, keys, .. } = attention;
    write!(out, "{:QUERY$}", "")?;
    for token in keys {
        write!(out, "  {}", fit_right(token, KEY - 2))?;
    }
    writeln!(out)?;
    for (token, row) in queries.iter().zip(&matrix.rows) {
        write!(out, "{} ", fit(token, QUERY - 1))?;
        for &weight in row {
            let cell = format!("{weight:>KEY$.2}");
            if shaded {
                write!(out, "{}{cell}\x1b[0m", shade(weight))?
            } else {
                write!(out, "{cell}")?
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The escape sequence for the background [`colour`] and a readable foreground.
fn shade(weight: f32) -> String {
    let [r, g, b] = colour(weight);
    let foreground = if weight > 0.5 { 97 } else { 30 };
    format!("\x1b[{foreground};48;2;{r};{g};{b}m")
}
