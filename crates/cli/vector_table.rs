//! Tables of vectors and of their cosines for a terminal.

use std::io::{self, Write};

use crate::fit::fit;

/// The width of the column of texts.
pub const TEXT: usize = 40;
/// The number of values shown per vector.
const VALUES: usize = 4;
/// The width of the column of values: 7 characters for each value of magnitude below 999,999.5,
/// and spaces between them.
const FIRST_VALUES: usize = 8 * VALUES - 1;
/// The maximum number of texts for which the scores of all pairs are shown.
pub const MAX_SCORES: usize = 10;

/// Writes a line per text: the first values of its vector, and its cosine with each text if there
/// are at most [`MAX_SCORES`].
pub fn vectors(
    out: &mut impl Write,
    dimension: usize,
    texts: &[impl AsRef<str>],
    vectors: &[Vec<f32>],
) -> io::Result<()> {
    let show_cosines = texts.len() <= MAX_SCORES;
    let plural = if texts.len() == 1 { "" } else { "s" };
    writeln!(out, "{} text{plural}, {dimension} dimensions", texts.len())?;
    if texts.is_empty() {
        return Ok(());
    }
    write!(out, "\n{:>5}  {:TEXT$}  {:FIRST_VALUES$}", "", "text", "first values")?;
    for number in (1..=texts.len()).filter(|_| show_cosines) {
        write!(out, "  {:>6}", format!("cos {number}"))?;
    }
    writeln!(out)?;
    for (number, (text, vector)) in (1..).zip(texts.iter().zip(vectors)) {
        let values: Vec<String> =
            vector.iter().take(VALUES).map(|&value| in_seven_characters(value)).collect();
        let values = values.join(" ");
        write!(out, "{number:>5}  {}  {values:FIRST_VALUES$}", fit(text.as_ref(), TEXT))?;
        for other in vectors.iter().filter(|_| show_cosines) {
            write!(out, "  {:>6.3}", cosine(vector, other))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// A value in 7 characters, if its magnitude is below 999,999.5.
fn in_seven_characters(value: f32) -> String {
    let decimals = (0..4).find(|&n| format!("{:+.*}", n + 1, value).len() > 7).unwrap_or(4);
    format!("{value:>+7.decimals$}")
}

/// Writes the cosine of every pair of vectors.
pub fn cosines(out: &mut impl Write, texts: &[&str], vectors: &[Vec<f32>]) -> io::Result<()> {
    write!(out, "{:5}  {:TEXT$}", "", "text")?;
    for number in 1..=texts.len() {
        write!(out, "  {number:>6}")?;
    }
    writeln!(out)?;
    for (number, (text, vector)) in (1..).zip(texts.iter().zip(vectors)) {
        write!(out, "{number:>5}  {}", fit(text, TEXT))?;
        for other in vectors {
            write!(out, "  {:>6.3}", cosine(vector, other))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The cosine of the angle between two vectors; 0 if one of them is zero, as in
/// sentence-transformers.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    match (dot(a, a) * dot(b, b)).sqrt() {
        0.0 => 0.0,
        lengths => dot(a, b) / lengths,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_seven_characters() {
        for (value, expected) in [
            (0.25, "+0.2500"),
            (-9.99999, "-10.000"),
            (18.6527, "+18.653"),
            (-203.6348, "-203.63"),
            (99999.0, " +99999"),
            (f32::NAN, "    NaN"),
        ] {
            assert_eq!(in_seven_characters(value), expected);
        }
    }

    #[test]
    fn cosine_does_not_depend_on_length() {
        assert_eq!(cosine(&[1., 0.], &[5., 0.]), 1.0);
        assert!((cosine(&[1., 0.], &[3., 4.]) - 0.6).abs() < 1e-7);
    }

    #[test]
    fn cosine_with_a_zero_vector_is_zero() {
        assert_eq!(cosine(&[0., 0.], &[3., 4.]), 0.0);
        assert_eq!(cosine(&[0., 0.], &[0., 0.]), 0.0);
        assert!(cosine(&[f32::NAN, 0.], &[3., 4.]).is_nan());
    }
}
