//! The warning that texts were truncated.

use encoder::Truncated;

/// How many texts were truncated, and by how much.
#[derive(Debug, Default)]
pub struct Truncation {
    texts: usize,
    tokens: usize,
}

impl Truncation {
    pub fn add(&mut self, truncated: &[Truncated]) {
        self.texts += truncated.len();
        self.tokens += truncated.iter().map(|text| text.tokens - text.kept).sum::<usize>();
    }

    /// Prints the warning, if a text was truncated; `advice` says what reads such texts whole.
    pub fn warn(&self, max_seq_length: usize, advice: &str) {
        let Self { texts, tokens } = self;
        if *texts > 0 {
            let texts_were = if *texts == 1 { "text was" } else { "texts were" };
            let plural = if *tokens == 1 { "" } else { "s" };
            eprintln!(
                "bert: {texts} {texts_were} longer than {max_seq_length} tokens and truncated by \
                 {tokens} token{plural} in all{advice}"
            );
        }
    }
}
