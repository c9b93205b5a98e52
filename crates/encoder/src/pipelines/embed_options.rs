//! How to embed texts.

use crate::Prompt;

/// How to embed texts: the prompt, and the handling of long texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbedOptions<'a> {
    /// The prompt that is prepended to each text.
    pub prompt: Prompt<'a>,
    /// How to handle texts longer than the model's maximum length.
    pub long_texts: LongTexts,
}

impl<'a> EmbedOptions<'a> {
    /// The default options: the model's default prompt, if any; long texts are truncated.
    pub fn new() -> Self {
        Self::default()
    }

    /// These options with a prompt: [`Prompt::Query`] for search queries, [`Prompt::Document`] for
    /// the documents to search.
    #[doc(alias = "encode_query", alias = "encode_document")]
    pub fn with_prompt(self, prompt: Prompt<'a>) -> Self {
        Self { prompt, ..self }
    }

    /// These options with another treatment of long texts.
    pub fn with_long_texts(self, long_texts: LongTexts) -> Self {
        Self { long_texts, ..self }
    }
}

crate::choices! {
    /// How to handle texts longer than the model's maximum length.
    ///
    /// - `Truncate`: [`TokenizedTexts::truncated`](crate::TokenizedTexts::truncated) lists the
    ///   texts.
    /// - `Refuse`: a long text is [`crate::InputError::LongText`].
    /// - `Windows`: the weight of a window in the average is its number of pooled tokens without
    ///   special tokens. The mean is normalised if the model normalises its vectors.
    pub enum LongTexts: "treatment of long texts", default Truncate {
        /// Truncate long texts, with a warning.
        Truncate = "truncate",
        /// Stop at the first long text.
        Refuse = "refuse",
        /// Split long texts into windows, and average the windows' vectors.
        Windows = "windows",
    }
}
