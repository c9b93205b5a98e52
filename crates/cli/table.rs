//! A few vectors for a person to read.

use std::io::{self, Write};

use unicode_width::UnicodeWidthChar;

/// Columns for a text.
const TEXT: usize = 40;
/// Values shown of a vector.
const VALUES: usize = 4;
/// Cosines are shown between at most so many texts.
const COSINES: usize = 10;

/// Writes a line a text: its first values, and its cosine with each text where they are few.
pub fn write(
    out: &mut impl Write,
    dimension: usize,
    texts: &[String],
    embeddings: &[Vec<f32>],
) -> io::Result<()> {
    let few = texts.len() <= COSINES;
    let plural = if texts.len() == 1 { "" } else { "s" };
    writeln!(out, "{} text{plural}, {dimension} dimensions", texts.len())?;
    if texts.is_empty() {
        return Ok(());
    }
    write!(out, "\n{:>5}  {:TEXT$}  {:31}", "", "text", "first values")?;
    for number in (1..=texts.len()).filter(|_| few) {
        write!(out, "  {:>6}", format!("cos {number}"))?;
    }
    writeln!(out)?;
    for (number, (text, embedding)) in (1..).zip(texts.iter().zip(embeddings)) {
        write!(out, "{number:>5}  {}  ", fit(text, TEXT))?;
        for value in embedding.iter().take(VALUES) {
            write!(out, "{value:>+7.4} ")?;
        }
        for other in embeddings.iter().filter(|_| few) {
            write!(out, "  {:>6.3}", cosine(embedding, other))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Writes the cosine of each text's vector with each.
pub fn cosines(out: &mut impl Write, texts: &[&str], embeddings: &[Vec<f32>]) -> io::Result<()> {
    write!(out, "{:5}  {:TEXT$}", "", "text")?;
    for number in 1..=texts.len() {
        write!(out, "  {number:>6}")?;
    }
    writeln!(out)?;
    for (number, (text, embedding)) in (1..).zip(texts.iter().zip(embeddings)) {
        write!(out, "{number:>5}  {}", fit(text, TEXT))?;
        for other in embeddings {
            write!(out, "  {:>6.3}", cosine(embedding, other))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The cosine of the angle between two vectors; 0 if one of them is 0, as in sentence-transformers.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    match (dot(a, a) * dot(b, b)).sqrt() {
        0.0 => 0.0,
        lengths => dot(a, b) / lengths,
    }
}

/// The text in just so many columns; control characters, which could command the terminal, as `·`.
pub fn fit(text: &str, columns: usize) -> String {
    let (mut fitted, mut width) = (String::new(), 0);
    let mut rest = text.chars().map(|c| if c.is_control() { '·' } else { c }).peekable();
    while let Some(&c) = rest.peek() {
        let more = c.width().unwrap_or(0);
        if width + more > columns {
            break;
        }
        fitted.push(c);
        width += more;
        rest.next();
    }
    if rest.peek().is_some() {
        while width > columns - 1 {
            width -= fitted.pop().and_then(UnicodeWidthChar::width).unwrap_or(0);
        }
        fitted.push('…');
        width += 1;
    }
    fitted + &" ".repeat(columns - width)
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthStr;

    use super::*;

    #[test]
    fn a_text_takes_its_columns_and_commands_nothing() {
        for text in
            ["", "short", &"x".repeat(40), &"x".repeat(41), &"東京".repeat(30), "\x1b[31mred"]
        {
            assert_eq!(fit(text, TEXT).width(), TEXT, "{text:?}");
            assert!(!fit(text, TEXT).contains('\x1b'));
        }
        assert_eq!(fit(&"x".repeat(41), TEXT), "x".repeat(39) + "…");
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
