//! RoBERTa's tokenizer: byte-level BPE with a vocabulary and its merges.
//! Radford et al. 2019, section 2.2, and Liu et al. 2019, <https://arxiv.org/abs/1907.11692>; the
//! rules are those of `RobertaTokenizer` in Hugging Face transformers 5.23.

use serde::Deserialize;
use tokenizers::{
    AddedToken, Tokenizer,
    models::bpe::{BPE, Merges, Vocab},
    pre_tokenizers::byte_level::ByteLevel,
    processors::roberta::RobertaProcessing,
};

use crate::text::{bpe, tokenizer_config::TokenizerConfig, tokenizer_json::TokenizerJson};

/// Builds the tokenizer from the vocabulary and the merges of a `tokenizer.json`.
///
/// # Errors
/// An error if a merge is not two tokens, if two tokens have the same id, if the vocabulary lacks
/// a token of a merge or the merge's result, or if neither the vocabulary nor the added tokens
/// contain the separator or classification token; the error of
/// [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_json(json: &str, config: &TokenizerConfig) -> tokenizers::Result<Tokenizer> {
    /// The other keys of the model are ignored: the rules are those of the class.
    #[derive(Deserialize)]
    struct Model {
        vocab: Vocab,
    }
    let (json, merges) = bpe::with_merges::<TokenizerJson<Model>>(json)?;
    let (added, truncation) = (json.added_tokens(config), json.truncation());
    let mut tokenizer = tokenizer("merges", json.model.vocab, merges, added, config)?;
    tokenizer.with_truncation(truncation)?;
    Ok(tokenizer)
}

/// Builds the tokenizer from `vocab.json` (the id of each token) and `merges.txt` (one pair of
/// tokens per line).
///
/// # Errors
/// An error if a file is not in this format, if two tokens have the same id, if the vocabulary
/// lacks a token of a merge or the merge's result, or if neither the vocabulary nor the added
/// tokens contain the separator or classification token; the error of
/// [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_vocab_and_merges(
    vocabulary: &[u8],
    merges: &[u8],
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    let vocab = serde_json::from_slice(vocabulary)?;
    let lines = std::str::from_utf8(merges).map_err(|error| format!("merges.txt: {error}"))?;
    let pairs = lines.lines().map(str::trim).map(bpe::pair).filter_map(Result::transpose);
    let merges = pairs.collect::<Result<_, _>>().map_err(|error| format!("merges.txt: {error}"))?;
    tokenizer("merges.txt", vocab, merges, vec![], config)
}

/// Builds the tokenizer. Errors about the merges name `source`.
fn tokenizer(
    source: &str,
    vocab: Vocab,
    merges: Merges,
    added: Vec<(u32, AddedToken)>,
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    // Without an unknown token: a byte that the vocabulary lacks is left out.
    let model = bpe::build(BPE::builder(), vocab, merges, 0, source)?;
    let add_prefix_space = config.add_prefix_space().unwrap_or(false);
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(add_prefix_space)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    config.add_tokens_with_ids(&mut tokenizer, added)?;
    let id = |key| config.token_with_id(&tokenizer, key);
    let processor = RobertaProcessing::new(id("sep_token")?, id("cls_token")?)
        .trim_offsets(config.trim_offsets())
        .add_prefix_space(add_prefix_space);
    config.add_special_tokens(&mut tokenizer, true)?;
    tokenizer.with_post_processor(Some(processor));
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelFiles, load::ModelFolder, text::sentence_config::SentenceConfig};

    fn config() -> tokenizers::Result<TokenizerConfig> {
        let files = ModelFolder::new(&ModelFiles::memory("m", [("README.md", b"".as_slice())]));
        Ok(TokenizerConfig::from_files(&files, &SentenceConfig::default(), "RobertaTokenizer")?)
    }

    fn tokenizer_with(merges: &str) -> tokenizers::Result<Tokenizer> {
        let vocab = r#"{"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}"#;
        let json = format!(r#"{{"model": {{"vocab": {vocab}, "merges": {merges}}}}}"#);
        from_json(&json, &config()?)
    }

    #[test]
    fn merges_of_a_tokenizer_json_are_lists_or_lines() -> tokenizers::Result<()> {
        for merges in [r#"[["a", "b"]]"#, r##"["#version: 0.2", "a b"]"##] {
            assert_eq!(tokenizer_with(merges)?.encode("abb", true)?.get_ids(), [0, 4, 3, 1]);
        }
        Ok(())
    }

    #[test]
    fn errors_name_the_merges() {
        let error = |merges| tokenizer_with(merges).unwrap_err().to_string();
        assert_eq!(error(r#"[["b", "a"]]"#), "merges: Token `ba` out of vocabulary");
        assert_eq!(error(r#"[["ab", "b"]]"#), "merges: Token `abb` out of vocabulary");
        let of_a_file = from_vocab_and_merges(br#"{"a": 0, "b": 1}"#, b"a b b", &config().unwrap());
        assert_eq!(
            of_a_file.unwrap_err().to_string(),
            "merges.txt: expected two tokens on each line, got \"a b b\""
        );
    }
}
