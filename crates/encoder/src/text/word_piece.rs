//! The WordPiece tokenizer of BERT and MPNet, with the vocabulary of a `vocab.txt` or a
//! `tokenizer.json`. Devlin et al. 2019; the rules are those of `BertTokenizer` in Hugging Face
//! transformers 5.23.

use serde::Deserialize;
use tokenizers::{
    AddedToken, Tokenizer,
    decoders::wordpiece::WordPiece as WordPieceDecoder,
    models::{bpe::Vocab, wordpiece::WordPiece},
    pre_tokenizers::bert::BertPreTokenizer,
    processors::{PostProcessorWrapper, bert::BertProcessing, roberta::RobertaProcessing},
};

use crate::text::{
    hash_order, tokenizer_class::SpecialTokenLayout, tokenizer_config::TokenizerConfig,
    tokenizer_json::TokenizerJson,
};

/// Maximum number of characters of a word. Longer words become the unknown token.
const MAX_INPUT_CHARS_PER_WORD: usize = 100;

/// The model of a `tokenizer.json`. Its other keys are ignored: the rules are those of the class.
#[derive(Deserialize)]
pub(crate) struct Model {
    vocab: Vocab,
}

/// Builds a tokenizer with BERT's rules from the vocabulary of a `tokenizer.json`.
///
/// # Errors
/// An error that names the token if neither the vocabulary nor the added tokens contain the
/// unknown, separator or classification token; the error of
/// [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_json(
    json: TokenizerJson<Model>,
    config: &TokenizerConfig,
    layout: SpecialTokenLayout,
) -> tokenizers::Result<Tokenizer> {
    let (added, truncation) = (json.added_tokens(config), json.truncation());
    let mut tokenizer = tokenizer(json.model.vocab, added, config, layout)?;
    tokenizer.with_truncation(truncation)?;
    Ok(tokenizer)
}

/// Builds the tokenizer from a `vocab.txt`, which has one token per line.
///
/// # Errors
/// An error if the vocabulary is not UTF-8, or if neither the vocabulary nor the added tokens
/// contain the unknown, separator or classification token; the error of
/// [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_vocab_txt(
    vocabulary: &[u8],
    config: &TokenizerConfig,
    layout: SpecialTokenLayout,
) -> tokenizers::Result<Tokenizer> {
    let text = std::str::from_utf8(vocabulary)?;
    let pieces = text.lines().zip(0u32..).map(|(line, id)| (line.trim_end().to_string(), id));
    tokenizer(pieces.collect(), vec![], config, layout)
}

fn tokenizer(
    vocab: Vocab,
    added: Vec<(u32, AddedToken)>,
    config: &TokenizerConfig,
    layout: SpecialTokenLayout,
) -> tokenizers::Result<Tokenizer> {
    hash_order::check_ids(&vocab)?;
    let model = WordPiece::builder()
        .vocab(vocab)
        .unk_token(config.named("unk_token").to_string())
        .continuing_subword_prefix("##".to_string())
        .max_input_chars_per_word(MAX_INPUT_CHARS_PER_WORD)
        .build()?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(Some(config.bert_normalizer()))?;
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    tokenizer.with_decoder(Some(WordPieceDecoder::default()));
    config.add_tokens_with_ids(&mut tokenizer, added)?;
    let id = |key| config.token_with_id(&tokenizer, key);
    id("unk_token")?;
    let (sep, cls) = (id("sep_token")?, id("cls_token")?);
    let processor: PostProcessorWrapper = match layout {
        SpecialTokenLayout::Bert => BertProcessing::new(sep, cls).into(),
        SpecialTokenLayout::Roberta => {
            RobertaProcessing::new(sep, cls).add_prefix_space(false).into()
        }
    };
    config.add_special_tokens(&mut tokenizer, true)?;
    tokenizer.with_post_processor(Some(processor));
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelFiles, load::ModelFolder, text::sentence_config::SentenceConfig};

    fn config() -> TokenizerConfig {
        let no_files = ModelFolder::new(&ModelFiles::memory("m", [("README.md", b"".as_slice())]));
        TokenizerConfig::from_files(&no_files, &SentenceConfig::default(), "BertTokenizer").unwrap()
    }

    #[test]
    fn a_vocabulary_without_sep_token_or_of_invalid_utf8_is_an_error() {
        let error = |vocabulary: &[u8]| {
            from_vocab_txt(vocabulary, &config(), SpecialTokenLayout::Bert).unwrap_err().to_string()
        };
        assert_eq!(
            error(b"[UNK]\n[CLS]\nhello"),
            "the vocabulary does not contain \"[SEP]\": expected the sep_token of the tokenizer \
             settings"
        );
        assert!(error(b"[UNK]\n\xff").contains("utf-8"));
    }

    #[test]
    fn line_numbers_are_ids_with_crlf_and_trailing_spaces() -> tokenizers::Result<()> {
        let vocabulary = b"[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\nhi \r\n##s";
        let tokenizer = from_vocab_txt(vocabulary, &config(), SpecialTokenLayout::Bert)?;
        assert_eq!(tokenizer.encode("His x", true)?.get_ids(), [2, 4, 5, 1, 3]);
        assert_eq!(tokenizer.decode(&[2, 4, 5, 3], true)?, "his");
        Ok(())
    }
}
