//! The warning that texts were truncated.

use encoder::Truncated;

/// How many texts were truncated, and by how much.
#[derive(Debug)]
pub struct Truncation {
    /// The singular and the plural of what is truncated.
    of: [&'static str; 2],
    texts: usize,
    tokens: usize,
}

impl Default for Truncation {
    fn default() -> Self {
        Self::of("text", "texts")
    }
}

impl Truncation {
    /// A count of something else than texts: its singular and its plural.
    pub fn of(one: &'static str, several: &'static str) -> Self {
        Self { of: [one, several], texts: 0, tokens: 0 }
    }

    pub fn add(&mut self, truncated: &[Truncated]) {
        self.texts += truncated.len();
        self.tokens += truncated.iter().map(|text| text.tokens - text.kept).sum::<usize>();
    }

    /// Prints the warning, if a text was truncated; `advice` says what reads such texts whole.
    pub fn warn(&self, max_seq_length: usize, advice: &str) {
        let Self { of: [one, several], texts, tokens } = self;
        if *texts > 0 {
            let (what, was) = if *texts == 1 { (one, "was") } else { (several, "were") };
            let plural = if *tokens == 1 { "" } else { "s" };
            eprintln!(
                "bert: {texts} {what} {was} longer than {max_seq_length} tokens and truncated by \
                 {tokens} token{plural} in all{advice}"
            );
        }
    }
}
