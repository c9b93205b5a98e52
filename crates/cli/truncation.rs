//! The warning that texts were truncated.

use crate::messages;

/// The number of truncated texts.
#[derive(Debug)]
pub struct Truncation {
    /// The noun for the truncated items, singular and plural.
    noun: [&'static str; 2],
    texts: u64,
}

impl Default for Truncation {
    fn default() -> Self {
        Self::of(["text", "texts"])
    }
}

impl Truncation {
    /// Counts truncated items, which the warning calls `noun`, singular and plural.
    pub fn of(noun: [&'static str; 2]) -> Self {
        Self { noun, texts: 0 }
    }

    pub fn add(&mut self, texts: u64) {
        self.texts += texts;
    }

    /// Prints the warning, with `advice` at its end, if a text was truncated.
    pub fn warn(&self, max_seq_length: usize, advice: &str) {
        let Self { noun: [one, several], texts } = self;
        if *texts > 0 {
            let noun = if *texts == 1 { one } else { several };
            messages::print(&format!(
                "{texts} {noun} truncated to {max_seq_length} tokens{advice}"
            ));
        }
    }
}
