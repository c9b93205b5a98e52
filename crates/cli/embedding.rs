//! The output of the command `embed` for each kind of embedding model.

use std::io::{self, Write};

use anyhow::Result;
use corpus::StoredRow;
use encoder::{Embed, Embedder, SparseEmbedder, SparseVector};

use crate::{
    commands::compare::{check_finite, warn_other_similarity},
    fit::fit,
    vector_table::{self, TEXT},
};

/// Number of words of a sparse vector in a table.
const WORDS: usize = 8;

/// An embedding model whose rows the command prints.
pub trait Printed: Embed<Row: StoredRow> {
    /// Checks that all values are finite.
    ///
    /// # Errors
    /// A message that names the first text with another value.
    fn check<S: AsRef<str>>(texts: &[S], rows: &[Self::Row]) -> Result<()>;

    /// Warns before the first text if the table differs from what the model was made for.
    fn warn_before_table(&self) {}

    /// Writes a table with a line per text.
    ///
    /// # Errors
    /// The error of `out`.
    fn write_table(
        &self,
        out: &mut impl Write,
        texts: &[String],
        rows: &[Self::Row],
    ) -> io::Result<()>;
}

impl Printed for Embedder {
    fn check<S: AsRef<str>>(texts: &[S], rows: &[Vec<f32>]) -> Result<()> {
        check_finite(texts, rows)
    }

    fn warn_before_table(&self) {
        warn_other_similarity(self);
    }

    fn write_table(
        &self,
        out: &mut impl Write,
        texts: &[String],
        rows: &[Vec<f32>],
    ) -> io::Result<()> {
        vector_table::vectors(out, Embed::dimension(self), texts, rows)
    }
}

impl Printed for SparseEmbedder {
    fn check<S: AsRef<str>>(_: &[S], _: &[SparseVector]) -> Result<()> {
        Ok(()) // the model has checked the values
    }

    fn write_table(
        &self,
        out: &mut impl Write,
        texts: &[String],
        rows: &[SparseVector],
    ) -> io::Result<()> {
        let plural = if texts.len() == 1 { "" } else { "s" };
        writeln!(out, "{} text{plural}, {} dimensions", texts.len(), self.dimension())?;
        if texts.is_empty() {
            return Ok(());
        }
        writeln!(out, "\n{:>5}  {:TEXT$}  {:>6}  largest values", "", "text", "values")?;
        for (number, (text, row)) in (1..).zip(texts.iter().zip(rows)) {
            let words = self.decode(row).into_iter().take(WORDS);
            let words: Vec<String> =
                words.map(|(word, value)| format!("{word} {value:.3}")).collect();
            let (text, count) = (fit(text, TEXT), row.indices.len());
            writeln!(out, "{number:>5}  {text}  {count:>6}  {}", words.join(", "))?;
        }
        Ok(())
    }
}
