//! RoBERTa's tokenizer: byte-level BPE with a vocabulary and its merges.
//! Radford et al. 2019, section 2.2, and Liu et al. 2019, <https://arxiv.org/abs/1907.11692>; the
//! rules are those of `RobertaTokenizer` in Hugging Face transformers 5.23.

use std::collections::HashMap;

use tokenizers::{
    AddedToken, ModelWrapper, Tokenizer,
    models::bpe::{BPE, BpeBuilder, Vocab},
    pre_tokenizers::byte_level::ByteLevel,
    processors::roberta::RobertaProcessing,
};

use crate::text::{tokenizer_config::TokenizerConfig, tokenizer_json::TokenizerJson};

/// Builds the tokenizer from the vocabulary and the merges of a `tokenizer.json`.
///
/// # Errors
/// An error if the model is not BPE, or if neither the vocabulary nor the added tokens contain the
/// separator or classification token; the error of [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_json(
    json: TokenizerJson,
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    let added = json.added_tokens(config);
    match json.model {
        ModelWrapper::BPE(model) => {
            let mut tokenizer = tokenizer(model, added, config)?;
            tokenizer.with_truncation(json.truncation.map(Into::into))?;
            Ok(tokenizer)
        }
        _ => Err(config.wrong_model("BPE").into()),
    }
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
    let vocabulary: HashMap<String, u32> = serde_json::from_slice(vocabulary)?;
    let vocabulary: Vocab = vocabulary.into_iter().collect();
    let lines = std::str::from_utf8(merges).map_err(|error| format!("merges.txt: {error}"))?;
    let lines = lines.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let merges = lines.map(|line| {
        let pair = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
        let pair = pair.map(|(left, right)| (left.to_string(), right.to_string()));
        pair.ok_or_else(|| format!("merges.txt: expected two tokens on each line, got {line:?}"))
    });
    let merges = merges.collect::<Result<Vec<_>, _>>()?;
    let model = BpeBuilder::new().vocab_and_merges(vocabulary, merges).build();
    let model = model.map_err(|error| format!("merges.txt: {error}"))?;
    tokenizer(model, vec![], config)
}

fn tokenizer(
    mut model: BPE,
    added: Vec<(u32, AddedToken)>,
    config: &TokenizerConfig,
) -> tokenizers::Result<Tokenizer> {
    model.dropout = None;
    model.unk_token = None; // a byte that the vocabulary lacks is left out
    model.continuing_subword_prefix = None;
    model.end_of_word_suffix = None;
    model.fuse_unk = false;
    model.byte_fallback = false;
    model.ignore_merges = false;
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
