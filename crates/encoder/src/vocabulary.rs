//! A tokenizer of `vocab.txt`: BERT's word pieces, where a folder has no `tokenizer.json`.
//! Devlin et al. 2019; the rules are those of `BertTokenizer` in Hugging Face transformers.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenizers::{
    AddedToken, Tokenizer, decoders::wordpiece::WordPiece as WordPieceDecoder,
    models::wordpiece::WordPiece, normalizers::BertNormalizer,
    pre_tokenizers::bert::BertPreTokenizer, processors::bert::BertProcessing,
};

/// What `tokenizer_config.json` says of word pieces.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct WordPieceConfig {
    do_lower_case: Option<bool>,
    strip_accents: Option<bool>,
    tokenize_chinese_chars: Option<bool>,
    unk_token: Option<SpecialToken>,
    sep_token: Option<SpecialToken>,
    cls_token: Option<SpecialToken>,
    pad_token: Option<SpecialToken>,
    mask_token: Option<SpecialToken>,
    /// By their ids, in digits.
    #[serde(default)]
    added_tokens_decoder: BTreeMap<String, AddedToken>,
}

/// A token's text, or that and how it is found in texts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Token { content: String },
}

impl SpecialToken {
    fn text<'a>(token: &'a Option<Self>, default: &'a str) -> &'a str {
        match token {
            None => default,
            Some(Self::Text(content) | Self::Token { content }) => content,
        }
    }
}

impl WordPieceConfig {
    /// The token that stands for a gap.
    pub(crate) fn mask(&self) -> &str {
        SpecialToken::text(&self.mask_token, "[MASK]")
    }

    /// What it makes of a text before it is split.
    pub(crate) fn normalizer(&self) -> BertNormalizer {
        BertNormalizer::new(
            true,
            self.tokenize_chinese_chars.unwrap_or(true),
            self.strip_accents,
            self.do_lower_case.unwrap_or(true),
        )
    }

    /// The tokenizer of a vocabulary, one piece a line.
    ///
    /// # Errors
    /// A vocabulary that is no UTF-8, or lacks a token that every text gets.
    pub(crate) fn tokenizer(&self, vocabulary: &[u8]) -> tokenizers::Result<Tokenizer> {
        let text = std::str::from_utf8(vocabulary)?.replace("\r\n", "\n");
        let pieces: Vec<&str> = text.split_terminator('\n').collect();
        let ids = pieces.iter().zip(0u32..).map(|(piece, id)| (piece.to_string(), id));
        let [unk, sep, cls, pad, mask] = [
            SpecialToken::text(&self.unk_token, "[UNK]"),
            SpecialToken::text(&self.sep_token, "[SEP]"),
            SpecialToken::text(&self.cls_token, "[CLS]"),
            SpecialToken::text(&self.pad_token, "[PAD]"),
            self.mask(),
        ];
        let id = |token: &str| {
            let last = pieces.iter().rposition(|piece| *piece == token);
            let id = last.ok_or_else(|| format!("it lacks {token:?}, which texts need"))?;
            Ok::<_, tokenizers::Error>((token.to_string(), id as u32))
        };
        let (_unk, ends) = (id(unk)?, BertProcessing::new(id(sep)?, id(cls)?));
        let model = WordPiece::builder()
            .vocab(ids.collect::<std::collections::HashMap<_, _, _>>())
            .unk_token(unk.to_string())
            .build()?;
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_normalizer(Some(self.normalizer()))?;
        tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
        tokenizer.with_post_processor(Some(ends));
        tokenizer.with_decoder(Some(WordPieceDecoder::default()));
        // Found in a text as they are, whatever normalisation would make of them.
        let known = [pad, unk, cls, sep, mask].into_iter().filter(|token| pieces.contains(token));
        let mut added = vec![];
        for (id, token) in &self.added_tokens_decoder {
            added.push((id.parse::<u32>()?, token.clone()));
        }
        added.sort_by_key(|(id, _)| *id);
        tokenizer.add_tokens(added.into_iter().map(|(_, token)| token))?;
        tokenizer.add_special_tokens(known.map(|token| AddedToken::from(token, true)))?;
        Ok(tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_that_texts_cannot_use_is_an_error() {
        let error = |vocabulary: &[u8]| {
            WordPieceConfig::default().tokenizer(vocabulary).unwrap_err().to_string()
        };
        assert_eq!(error(b"[UNK]\n[CLS]\nhello"), "it lacks \"[SEP]\", which texts need");
        assert!(error(b"[UNK]\n\xff").contains("utf-8"));
    }

    #[test]
    fn lines_are_ids_whatever_ends_them() -> tokenizers::Result<()> {
        let tokenizer = WordPieceConfig::default()
            .tokenizer(b"[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\nhi\r\n##s")?;
        assert_eq!(tokenizer.encode("His x", true)?.get_ids(), [2, 4, 5, 1, 3]);
        assert_eq!(tokenizer.decode(&[2, 4, 5, 3], true)?, "his");
        Ok(())
    }
}
