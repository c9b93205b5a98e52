//! The BPE model of a `tokenizer.json`. The vocabulary and the merges are most of the file: one
//! thread reads the vocabulary and skips the merges, another does the opposite.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error, SeqAccess, Visitor},
};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PaddingParams, PostProcessorWrapper,
    PreTokenizerWrapper, Tokenizer, TruncationParams,
    models::bpe::{BPE, BpeBuilder, Merges, Vocab},
};

use crate::text::{hash_order, tokenizer_json::model_type};

/// Builds the tokenizer that a `tokenizer.json` describes. `None` if its model is not BPE.
///
/// # Errors
/// An error for a damaged file, with the line and the column; an error for a dropout outside 0 to
/// 1; the errors of [`build`].
pub(crate) fn from_json(json: &str) -> tokenizers::Result<Option<Tokenizer>> {
    // The type is read with the rest: finding it first would take one more pass over the file.
    let (rules, merges) = match with_merges::<Rules>(json) {
        Ok((rules, _)) if rules.model.r#type.as_ref().is_some_and(|name| name != "BPE") => {
            return Ok(None);
        }
        Ok(file) => file,
        Err(error) if model_type(json.as_bytes()).is_ok_and(|name| name == "BPE") => {
            return Err(error.into());
        }
        Err(_) => return Ok(None),
    };
    if let Some(version) = rules.version.filter(|version| version != "1.0") {
        return Err(format!("expected version 1.0 of tokenizer.json, got {version}").into());
    }
    let Model { vocab, ignore_merges, fuse_unk, byte_fallback, .. } = rules.model;
    let mut builder = BPE::builder()
        .fuse_unk(fuse_unk.unwrap_or(false))
        .byte_fallback(byte_fallback.unwrap_or(false))
        .ignore_merges(ignore_merges.unwrap_or(false));
    let prefix = rules.model.continuing_subword_prefix.unwrap_or_default();
    let prefix_length = prefix.len();
    if !prefix.is_empty() {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(dropout) = rules.model.dropout {
        if !(0.0..=1.0).contains(&dropout) {
            return Err(format!("expected a dropout from 0 to 1, got {dropout}").into());
        }
        builder = builder.dropout(dropout);
    }
    if let Some(token) = rules.model.unk_token {
        builder = builder.unk_token(token);
    }
    if let Some(suffix) = rules.model.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    let model = build(builder, vocab, merges, prefix_length, "merges")?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(rules.normalizer)?;
    tokenizer.with_pre_tokenizer(rules.pre_tokenizer);
    tokenizer.with_post_processor(rules.post_processor);
    tokenizer.with_decoder(rules.decoder);
    tokenizer.with_truncation(rules.truncation)?;
    tokenizer.with_padding(rules.padding);
    tokenizer.add_tokens(rules.added_tokens)?;
    Ok(Some(tokenizer))
}

/// A `tokenizer.json` without the merges.
#[derive(Deserialize)]
struct Rules {
    version: Option<String>,
    truncation: Option<TruncationParams>,
    padding: Option<PaddingParams>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Model,
}

/// The model without its merges. [`BPE`] documents the keys.
#[derive(Deserialize)]
struct Model {
    r#type: Option<String>,
    vocab: Vocab,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
}

/// The keys of a `tokenizer.json` that `T` has, and the merges of the model.
///
/// # Errors
/// An error if the file is not JSON, or if a key has a value of another type.
pub(crate) fn with_merges<T: DeserializeOwned + Send>(
    json: &str,
) -> serde_json::Result<(T, Merges)> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        merges: Vec<Merge>,
    }
    let (file, merges) =
        rayon::join(|| serde_json::from_str(json), || serde_json::from_str::<File>(json));
    let merges = merges?.model.merges;
    Ok((file?, merges.into_iter().filter_map(|Merge(pair)| pair).collect()))
}

/// The two tokens of a merge, from a list or, in older files, from a line. `None` for a line that
/// names a version.
struct Merge(Option<(String, String)>);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a merge: a list of two tokens, or a string of two tokens")
    }

    fn visit_str<E: Error>(self, line: &str) -> Result<Merge, E> {
        pair(line).map(Merge).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
        let mut token = |index| -> Result<String, A::Error> {
            list.next_element()?.ok_or_else(|| Error::invalid_length(index, &self))
        };
        Ok(Merge(Some((token(0)?, token(1)?))))
    }
}

/// The two tokens of a line of merges. `None` if the line is empty or names a version.
///
/// # Errors
/// An error if the line is not two tokens with a space between them.
pub(crate) fn pair(line: &str) -> Result<Option<(String, String)>, String> {
    if line.is_empty() || line.starts_with("#version") {
        return Ok(None);
    }
    match line.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok(Some((left.into(), right.into()))),
        _ => Err(format!("expected two tokens on each line, got {line:?}")),
    }
}

/// The model of a vocabulary and its merges. The right token of each merge begins with a prefix of
/// `prefix_length` bytes that the merged token lacks. Errors about the merges name `source`.
///
/// # Errors
/// An error if two tokens have the same id, or if the vocabulary lacks a token of a merge or the
/// merge's result.
pub(crate) fn build(
    builder: BpeBuilder,
    vocab: Vocab,
    merges: Merges,
    prefix_length: usize,
    source: &str,
) -> tokenizers::Result<BPE> {
    hash_order::check_ids(&vocab)?;
    // The crate `tokenizers` panics if the result of a merge is longer than every token.
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    let too_long =
        |(left, right): &&(String, String)| left.len() + right.len() > longest + prefix_length;
    if let Some((left, right)) = merges.iter().find(too_long) {
        return Err(format!("{source}: Token `{left}{right}` out of vocabulary").into());
    }
    let model = builder.vocab_and_merges(vocab, merges).build();
    model.map_err(|error| format!("{source}: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCABULARY: &str = r#"{"<unk>": 0, "a": 1, "b": 2, "ab": 3, "abb": 4}"#;

    /// The reference is the crate's reading of the whole file.
    #[test]
    fn a_file_is_read_as_the_crate_reads_it() -> tokenizers::Result<()> {
        let options = r#""dropout": 0.25, "unk_token": "<unk>", "end_of_word_suffix": "x",
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": true,"#;
        for (model, merges) in [
            ("", r#"[["a", "b"], ["ab", "b"]]"#),
            (r#""type": "BPE","#, r##"["#version: 0.2", "a b", "ab b"]"##),
            (options, "[]"),
        ] {
            let json = format!(
                r#"{{"version": "1.0", "truncation": {{"direction": "Left", "max_length": 3,
                "strategy": "LongestFirst", "stride": 0}}, "padding": null,
                "normalizer": {{"type": "Lowercase"}}, "pre_tokenizer": {{"type": "Whitespace"}},
                "post_processor": {{"type": "ByteLevel", "add_prefix_space": true,
                "trim_offsets": false, "use_regex": true}}, "decoder": {{"type": "BPEDecoder",
                "suffix": "</w>"}}, "model": {{{model} "vocab": {VOCABULARY}, "merges": {merges}}},
                "added_tokens": [{{"id": 5, "content": "AB", "single_word": false, "lstrip": false,
                "rstrip": true, "normalized": true, "special": true}}]}}"#
            );
            let expected = json.parse::<Tokenizer>()?;
            let found = from_json(&json)?.unwrap();
            assert_eq!(serde_json::to_value(&*found)?, serde_json::to_value(&*expected)?);
            let ids = |tokenizer: &Tokenizer| -> tokenizers::Result<Vec<u32>> {
                Ok(tokenizer.encode("a b abb AB  abab", true)?.get_ids().to_vec())
            };
            if model != options {
                assert_eq!(ids(&found)?, ids(&expected)?);
            }
        }
        Ok(())
    }

    #[test]
    fn a_prefix_of_the_right_token_is_left_out_of_the_merged_token() -> tokenizers::Result<()> {
        let json = r###"{"model": {"type": "BPE", "continuing_subword_prefix": "##",
            "vocab": {"a": 0, "##b": 1, "ab": 2}, "merges": [["a", "##b"]]}}"###;
        let tokenizer = from_json(json)?.unwrap();
        assert_eq!(tokenizer.encode("ab", false)?.get_ids(), [2]);
        Ok(())
    }

    #[test]
    fn models_of_other_types_are_left_to_the_caller() -> tokenizers::Result<()> {
        for model in [
            r#""type": "WordPiece", "vocab": {"a": 0}"#,
            r#""type": "Other", "vocab": {"a": 0}, "merges": []"#,
            r#""unk_id": 0, "vocab": [["a", 0.5]]"#,
            r#""vocab": {"a": 0}"#,
        ] {
            assert!(from_json(&format!("{{\"model\": {{{model}}}}}"))?.is_none(), "{model}");
        }
        assert!(from_json("{").unwrap().is_none());
        Ok(())
    }

    #[test]
    fn errors_name_the_merge_and_its_place() {
        let error = |vocabulary: &str, merges: &str| {
            let json = format!("{{\"model\": {{\"vocab\": {vocabulary},\n\"merges\": {merges}}}}}");
            from_json(&json).unwrap_err().to_string()
        };
        let of = |merges| error(VOCABULARY, merges);
        assert_eq!(
            of(r#"["a b b"]"#),
            "expected two tokens on each line, got \"a b b\" at line 2 column 18"
        );
        let expected = "expected a merge: a list of two tokens, or a string of two tokens";
        assert_eq!(of(r#"[["a"]]"#), format!("invalid length 1, {expected} at line 2 column 16"));
        assert!(of(r#"[["a", "b", "b"]]"#).ends_with("at line 2 column 23"));
        assert_eq!(of("[5]"), format!("invalid type: integer `5`, {expected} at line 2 column 12"));
        assert_eq!(of(r#"[["b", "a"]]"#), "merges: Token `ba` out of vocabulary");
        assert_eq!(of(r#"[["abb", "b"]]"#), "merges: Token `abbb` out of vocabulary");
        assert_eq!(
            error(r#"{"a": 1, "b": 1}"#, "[]"),
            "tokens \"a\" and \"b\" have the id 1: expected distinct ids"
        );
    }
}
