//! The tokenizers of XLM-R, ALBERT and DeBERTa: a Unigram language model over pieces of text.
//! Kudo 2018, <https://arxiv.org/abs/1804.10959>; the rules are those of `XLMRobertaTokenizer`,
//! `AlbertTokenizer` and `DebertaV2Tokenizer` in Hugging Face transformers 5.23.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    NormalizerWrapper, PostProcessorWrapper, SplitDelimiterBehavior, Tokenizer,
    models::unigram::Unigram,
    normalizers::{
        self, Lowercase, NFC, NFKD, Replace, Strip, StripAccents, replace::ReplacePattern,
    },
    pre_tokenizers::{
        PreTokenizerWrapper,
        metaspace::{Metaspace, PrependScheme},
        punctuation::Punctuation,
        sequence::Sequence,
        whitespace::WhitespaceSplit,
    },
    processors::template::TemplateProcessing,
};

use crate::text::{
    tokenizer_class::UnigramRules,
    tokenizer_config::TokenizerConfig,
    tokenizer_json::{TokenWithId, TokenizerKind, Truncation, added_tokens},
};

/// The keys of a `tokenizer.json` that the class reads.
#[derive(Deserialize)]
struct UnigramJson {
    model: Vocabulary,
    normalizer: Option<Value>,
    post_processor: Option<PostProcessorWrapper>,
    truncation: Option<Truncation>,
    #[serde(default)]
    added_tokens: Vec<TokenWithId>,
}

#[derive(Deserialize)]
struct Vocabulary {
    /// Each piece with the logarithm of its probability.
    vocab: Vec<(String, f64)>,
}

/// Builds the tokenizer from the vocabulary and the compiled character map of a `tokenizer.json`.
///
/// # Errors
/// An error if the vocabulary is not Unigram, if it lacks the tokens at the ends of a text (which
/// an ALBERT file with a post-processor does not need), or if the character map cannot be parsed.
pub(crate) fn from_json(
    json: &[u8],
    config: &TokenizerConfig,
    rules: UnigramRules,
) -> tokenizers::Result<Tokenizer> {
    let json: UnigramJson = match serde_json::from_slice(json) {
        Ok(json) => json,
        Err(error) => {
            let TokenizerKind { model } = serde_json::from_slice(json)?;
            let is_other = model.kind.is_some_and(|kind| kind != "Unigram");
            return Err(if is_other { config.wrong_model("Unigram").into() } else { error.into() });
        }
    };
    let character_map = json.normalizer.and_then(character_map).transpose()?;
    // The id of the unknown token is 3 in XLM-R's vocabularies, and 1 in ALBERT's.
    let (unknown, normalizers) = match rules {
        UnigramRules::XlmRoberta => (3, character_map.into_iter().collect()),
        UnigramRules::Albert => {
            (1, albert_normalizers(config)?.into_iter().chain(character_map).collect())
        }
        UnigramRules::Deberta => {
            let token = config.named("unk_token");
            let is_unknown = |piece: &(String, f64)| *piece == (token.to_string(), 0.0);
            let unknown = json.model.vocab.iter().position(is_unknown);
            (unknown.unwrap_or(1), deberta_normalizers(config)?)
        }
    };
    let mut tokenizer = Tokenizer::new(Unigram::from(json.model.vocab, Some(unknown), false)?);
    if !normalizers.is_empty() {
        tokenizer.with_normalizer(Some(normalizers::Sequence::new(normalizers)))?;
    }
    let scheme = match (config.add_prefix_space().unwrap_or(true), rules) {
        (true, _) => PrependScheme::Always,
        (false, UnigramRules::Deberta) => PrependScheme::First,
        (false, _) => PrependScheme::Never,
    };
    let metaspace = Metaspace::new('▁', scheme, true);
    let words: Option<PreTokenizerWrapper> = match rules {
        UnigramRules::Deberta if config.splits_punctuation() => {
            Some(Punctuation::new(SplitDelimiterBehavior::Isolated).into())
        }
        UnigramRules::Deberta => None,
        _ => Some(WhitespaceSplit.into()),
    };
    let words = words.into_iter().chain([metaspace.clone().into()]).collect();
    tokenizer.with_pre_tokenizer(Some(Sequence::new(words)));
    tokenizer.with_decoder(Some(metaspace));
    config.add_tokens_with_ids(&mut tokenizer, added_tokens(&json.added_tokens, config))?;
    let id = |key| config.token_with_id(&tokenizer, key);
    let ends = match (rules, json.post_processor) {
        (UnigramRules::Albert, Some(ends)) => ends,
        (rules, _) => {
            let [first, last] = match rules {
                UnigramRules::XlmRoberta => ["bos_token", "eos_token"],
                UnigramRules::Albert | UnigramRules::Deberta => ["cls_token", "sep_token"],
            };
            let [(first, first_id), (last, last_id)] = [id(first)?, id(last)?];
            let (one, other) = ("$A".to_string(), "$B".to_string());
            // The classes of ALBERT and DeBERTa give type 1 to the second text.
            let other_type = |token: &str| match rules {
                UnigramRules::XlmRoberta => token.to_string(),
                UnigramRules::Albert | UnigramRules::Deberta => format!("{token}:1"),
            };
            let mut pair = vec![first.clone(), one.clone(), last.clone()];
            if rules == UnigramRules::XlmRoberta {
                pair.push(last.clone());
            }
            pair.extend([other_type(&other), other_type(&last)]);
            let ends = TemplateProcessing::builder()
                .try_single(vec![first.clone(), one, last.clone()])?
                .try_pair(pair)?
                .special_tokens(vec![(first, first_id), (last, last_id)])
                .build()?;
            ends.into()
        }
    };
    config.add_special_tokens(&mut tokenizer, true)?;
    tokenizer.with_post_processor(Some(ends));
    tokenizer.with_truncation(json.truncation.map(Into::into))?;
    Ok(tokenizer)
}

/// The normalizers of ALBERT's class before the character map.
fn albert_normalizers(config: &TokenizerConfig) -> tokenizers::Result<Vec<NormalizerWrapper>> {
    let mut all: Vec<NormalizerWrapper> =
        vec![Replace::new("``", "\"")?.into(), Replace::new("''", "\"")?.into()];
    if !config.keeps_accents() {
        all.extend([NormalizerWrapper::from(NFKD), StripAccents.into()]);
    }
    if config.lowercases(true) {
        all.push(Lowercase.into());
    }
    Ok(all)
}

/// The normalizers of DeBERTa's class.
fn deberta_normalizers(config: &TokenizerConfig) -> tokenizers::Result<Vec<NormalizerWrapper>> {
    let white_space = ReplacePattern::Regex(r"\s{2,}|[\n\r\t]".to_string());
    let all = [Replace::new(white_space, " ")?.into(), NFC.into(), Strip::new(false, true).into()];
    let lowercase = config.lowercases(false).then(|| Lowercase.into());
    Ok(lowercase.into_iter().chain(all).collect())
}

/// The first normalizer that is a compiled character map of SentencePiece. The class ignores the
/// other normalizers.
fn character_map(normalizer: Value) -> Option<serde_json::Result<NormalizerWrapper>> {
    let is_map = |normalizer: &Value| normalizer["type"] == "Precompiled";
    let map = match normalizer.get("normalizers") {
        Some(Value::Array(all)) => all.iter().find(|normalizer| is_map(normalizer)).cloned(),
        _ => Some(normalizer).filter(is_map),
    };
    map.map(serde_json::from_value)
}
