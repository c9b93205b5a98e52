//! The warning that texts were truncated.

use encoder::Truncated;

use crate::messages;

/// The number of truncated texts, and of the tokens that truncation removed.
#[derive(Debug)]
pub struct Truncation {
    /// The noun for the truncated items, singular and plural.
    noun: [&'static str; 2],
    texts: u64,
    tokens: u64,
}

impl Default for Truncation {
    fn default() -> Self {
        Self::of(["text", "texts"])
    }
}

impl Truncation {
    /// Counts truncated items, which the warning calls `noun`, singular and plural.
    pub fn of(noun: [&'static str; 2]) -> Self {
        Self { noun, texts: 0, tokens: 0 }
    }

    pub fn add(&mut self, truncated: &[Truncated]) {
        let tokens = truncated.iter().map(|text| (text.tokens - text.kept) as u64);
        self.add_counts(truncated.len() as u64, tokens.sum());
    }

    pub fn add_counts(&mut self, texts: u64, tokens: u64) {
        self.texts += texts;
        self.tokens += tokens;
    }

    /// Prints the warning, with `advice` at its end, if a text was truncated.
    pub fn warn(&self, max_seq_length: usize, advice: &str) {
        let Self { noun: [one, several], texts, tokens } = self;
        if *texts > 0 {
            let noun = if *texts == 1 { one } else { several };
            let plural = if *tokens == 1 { "" } else { "s" };
            messages::print(&format!(
                "{texts} {noun} truncated to {max_seq_length} tokens: {tokens} token{plural} \
                 removed{advice}"
            ));
        }
    }
}
