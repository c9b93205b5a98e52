//! The output of the command `embed` for each kind of embedding model.

use std::io::{self, Write};

use anyhow::Result;
use corpus::StoredRow;
use encoder::{
    BgeM3Embedder, BgeM3Embedding, Choice, Embed, Embedder, EmbeddingKind, MultiVector,
    MultiVectorEmbedder, SparseEmbedder, SparseVector,
};

use crate::{
    commands::compare::{check_finite, warn_other_similarity},
    fit::fit,
    vector_table::{self, MAX_SCORES, TEXT},
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
        let description = |row: &SparseVector| {
            let words = self.decode(row).into_iter().take(WORDS);
            let words: Vec<String> =
                words.map(|(word, value)| format!("{word} {value:.3}")).collect();
            (row.indices.len(), words.join(", "))
        };
        let columns = ["values", "largest values"];
        write_table(out, self.dimension(), texts, columns, rows.iter().map(description))
    }
}

impl Printed for MultiVectorEmbedder {
    fn check<S: AsRef<str>>(_: &[S], _: &[MultiVector]) -> Result<()> {
        Ok(()) // the model has checked the values
    }

    fn write_table(
        &self,
        out: &mut impl Write,
        texts: &[String],
        rows: &[MultiVector],
    ) -> io::Result<()> {
        let others = if rows.len() > MAX_SCORES { &[] } else { rows };
        let description = |row: &MultiVector| {
            let scores = self.similarity().scores(row, others).map_err(io::Error::other)?;
            let scores = scores.iter().map(|score| format!("{score:.3}"));
            Ok((row.len(), scores.collect::<Vec<_>>().join("  ")))
        };
        let columns = ["vectors", self.similarity().name()];
        let described = rows.iter().map(description).collect::<io::Result<Vec<_>>>()?;
        write_table(out, self.dimension(), texts, columns, described)
    }
}

impl Printed for BgeM3Embedder {
    fn check<S: AsRef<str>>(texts: &[S], rows: &[BgeM3Embedding]) -> Result<()> {
        check_finite(texts, &rows.iter().map(|row| &row.embedding).collect::<Vec<_>>())
    }

    fn warn_before_table(&self) {
        self.dense().warn_before_table();
    }

    /// Writes the table of each kind, after its name.
    fn write_table(
        &self,
        out: &mut impl Write,
        texts: &[String],
        rows: &[BgeM3Embedding],
    ) -> io::Result<()> {
        let dense: Vec<_> = rows.iter().map(|row| row.embedding.clone()).collect();
        let sparse: Vec<_> = rows.iter().map(|row| row.sparse_embedding.clone()).collect();
        let multi: Vec<_> = rows.iter().map(|row| row.multi_vector_embedding.clone()).collect();
        writeln!(out, "{}:", EmbeddingKind::Dense)?;
        self.dense().write_table(out, texts, &dense)?;
        writeln!(out, "\n{}:", EmbeddingKind::Sparse)?;
        self.sparse().write_table(out, texts, &sparse)?;
        writeln!(out, "\n{}:", EmbeddingKind::Multi)?;
        self.multi_vector().write_table(out, texts, &multi)
    }
}

/// Writes a line per text: the number of its values or vectors, and a description of them.
fn write_table(
    out: &mut impl Write,
    dimension: usize,
    texts: &[String],
    columns: [&str; 2],
    descriptions: impl IntoIterator<Item = (usize, String)>,
) -> io::Result<()> {
    let plural = if texts.len() == 1 { "" } else { "s" };
    writeln!(out, "{} text{plural}, {dimension} dimensions", texts.len())?;
    if texts.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:>5}  {:TEXT$}  {:>7}  {}", "", "text", columns[0], columns[1])?;
    for (number, (text, (count, description))) in (1..).zip(texts.iter().zip(descriptions)) {
        writeln!(out, "{number:>5}  {}  {count:>7}  {description}", fit(text, TEXT))?;
    }
    Ok(())
}
