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
    /// The role of the texts in a model that computes queries and documents in different ways.
    /// With [`TextRole::Unspecified`], the prompt decides: see [`Self::role()`].
    pub role: TextRole,
}

/// The role of a text in a model that computes queries and documents in different ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextRole {
    /// A text that documents are searched for.
    Query,
    /// A text that is searched.
    Document,
    /// Neither, or not known.
    #[default]
    Unspecified,
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

    /// These options for queries or for documents, whatever the prompt.
    pub fn with_role(self, role: TextRole) -> Self {
        Self { role, ..self }
    }

    /// The role of [`Self::with_role`]; without it, the texts are queries if the prompt is
    /// [`Prompt::Query`] or named `query`, and documents for [`Prompt::Document`] or `document`.
    ///
    /// ```
    /// use encoder::{EmbedOptions, Prompt, TextRole};
    ///
    /// let options = EmbedOptions::new().with_prompt(Prompt::Named("query"));
    /// assert_eq!(options.role(), TextRole::Query);
    /// assert_eq!(options.with_prompt(Prompt::Text("Find: ")).role(), TextRole::Unspecified);
    /// ```
    pub fn role(&self) -> TextRole {
        match (self.role, self.prompt) {
            (TextRole::Unspecified, Prompt::Query | Prompt::Named("query")) => TextRole::Query,
            (TextRole::Unspecified, Prompt::Document | Prompt::Named("document")) => {
                TextRole::Document
            }
            (role, _) => role,
        }
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
