//! RoBERTa's tokenizer: byte-level BPE with a vocabulary and its merges.
//! Radford et al. 2019, section 2.2, and Liu et al. 2019, <https://arxiv.org/abs/1907.11692>; the
//! rules are those of `RobertaTokenizer` in Hugging Face transformers 5.23.

use serde::Deserialize;
use tokenizers::{
    AddedToken, Tokenizer,
    models::bpe::{BPE, Vocab},
    pre_tokenizers::byte_level::ByteLevel,
    processors::roberta::RobertaProcessing,
};

use crate::text::{hash_order, tokenizer_config::TokenizerConfig, tokenizer_json::TokenizerJson};

/// The model of a `tokenizer.json`. Its other keys are ignored: the rules are those of the class.
#[derive(Deserialize)]
pub(crate) struct Model {
    vocab: Vocab,
    merges: Vec<Merge>,
}

/// The two tokens of a merge, in a list or, in older files, in a line with a space between them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a merge: a list of two tokens, or a string of two tokens")]
enum Merge {
    Pair(String, String),
    Line(String),
}

/// Builds the tokenizer from the vocabulary and the merges of a `tokenizer.json`.
///
/// # Errors
/// An error if a merge is not two tokens, if the vocabulary lacks a token of a merge or the merge's
/// result, or if neither the vocabulary nor the added tokens contain the separator or
/// classification token; the error of [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_json(
    json: TokenizerJson<Model>,
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    let (added, truncation) = (json.added_tokens(config), json.truncation());
    let merges = json.model.merges.into_iter().filter_map(|merge| match merge {
        Merge::Pair(left, right) => Some(Ok((left, right))),
        Merge::Line(line) => pair(&line),
    });
    let mut tokenizer = tokenizer("merges", json.model.vocab, merges, added, config)?;
    tokenizer.with_truncation(truncation)?;
    Ok(tokenizer)
}

/// Builds the tokenizer from `vocab.json` (the id of each token) and `merges.txt` (one pair of
/// tokens per line).
///
/// # Errors
/// An error if a file is not in this format, if the vocabulary lacks a token of a merge or the
/// merge's result, or if neither the vocabulary nor the added tokens contain the separator or
/// classification token; the error of [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_vocab_and_merges(
    vocabulary: &[u8],
    merges: &[u8],
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    let vocab = serde_json::from_slice(vocabulary)?;
    let lines = std::str::from_utf8(merges).map_err(|error| format!("merges.txt: {error}"))?;
    let merges = lines.lines().map(str::trim).filter_map(pair);
    tokenizer("merges.txt", vocab, merges, vec![], config)
}

/// The two tokens of a line of merges. `None` if the line is empty or names a version.
fn pair(line: &str) -> Option<Result<(String, String), String>> {
    if line.is_empty() || line.starts_with("#version") {
        return None;
    }
    let pair = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
    let pair = pair.map(|(left, right)| (left.to_string(), right.to_string()));
    Some(pair.ok_or_else(|| format!("expected two tokens on each line, got {line:?}")))
}

/// Builds the tokenizer. Errors about the merges name `source`.
fn tokenizer(
    source: &str,
    vocab: Vocab,
    merges: impl Iterator<Item = Result<(String, String), String>>,
    added: Vec<(u32, AddedToken)>,
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    hash_order::check_ids(&vocab)?;
    // The crate `tokenizers` panics if the result of a merge is longer than every token.
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    let merges = merges.map(|merge| match merge {
        Ok((left, right)) if left.len() + right.len() > longest => {
            Err(format!("Token `{left}{right}` out of vocabulary"))
        }
        merge => merge,
    });
    let merges = merges.collect::<Result<_, _>>().map_err(|error| format!("{source}: {error}"))?;
    // Without an unknown token: a byte that the vocabulary lacks is left out.
    let model = BPE::builder().vocab_and_merges(vocab, merges).build();
    let model = model.map_err(|error| format!("{source}: {error}"))?;
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
        from_json(serde_json::from_str(&json)?, &config()?)
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
        let lines = "merges: expected two tokens on each line, got \"a b b\"";
        assert_eq!(error(r#"["a b b"]"#), lines);
        assert_eq!(error(r#"[["b", "a"]]"#), "merges: Token `ba` out of vocabulary");
        assert_eq!(error(r#"[["ab", "b"]]"#), "merges: Token `abb` out of vocabulary");
        assert!(error(r#"[["a"]]"#).starts_with("expected a merge: a list of two tokens"));
    }
}
