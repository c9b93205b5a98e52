//! The tokenizers of XLM-R, CamemBERT, ALBERT and DeBERTa: a Unigram language model over pieces of
//! text. Kudo 2018, <https://arxiv.org/abs/1804.10959>; the rules are those of
//! `XLMRobertaTokenizer`, `CamembertTokenizer`, `AlbertTokenizer` and `DebertaV2Tokenizer` in
//! Hugging Face transformers 5.23.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken, NormalizerWrapper, PostProcessorWrapper, SplitDelimiterBehavior, Tokenizer,
    models::unigram::Unigram,
    normalizers::{
        self, Lowercase, NFC, NFKD, Precompiled, Replace, Strip, StripAccents,
        replace::ReplacePattern,
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
    sentence_piece::SentencePieceModel, tokenizer_class::UnigramRules,
    tokenizer_config::TokenizerConfig, tokenizer_json::TokenizerJson,
};

/// The model of a `tokenizer.json`. Its other keys are ignored: the rules are those of the class.
#[derive(Deserialize)]
pub(crate) struct Model {
    /// Each piece with the logarithm of its probability.
    vocab: Vec<(String, f64)>,
}

/// The parts of a tokenizer that a file contains.
struct Contents {
    /// Each piece with the logarithm of its probability.
    vocab: Vec<(String, f64)>,
    /// The index of the unknown token for DeBERTa's class, if no piece has the text of this token
    /// and the score 0. The other classes do not use this field.
    unknown: usize,
    character_map: Option<NormalizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    /// [`TokenizerConfig::adds_bos_and_eos`], if these keys replace the special tokens
    /// of the class.
    adds_bos_and_eos: Option<[bool; 2]>,
    /// The added tokens with their ids.
    added_tokens: Vec<(u32, AddedToken)>,
}

/// Builds the tokenizer from the vocabulary and the compiled character map of a `tokenizer.json`.
///
/// # Errors
/// An error if neither the vocabulary nor the added tokens contain the tokens at the ends of a text
/// (which an ALBERT file with a post-processor does not need), or if the character map cannot be
/// parsed; the error of [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_json(
    json: TokenizerJson<Model, Value, PostProcessorWrapper>,
    config: &TokenizerConfig,
    rules: UnigramRules,
) -> tokenizers::Result<Tokenizer> {
    let truncation = json.truncation();
    let contents = Contents {
        added_tokens: json.added_tokens(config),
        character_map: json.normalizer.and_then(character_map).transpose()?,
        vocab: json.model.vocab,
        unknown: config.unknown_id(),
        post_processor: json.post_processor,
        adds_bos_and_eos: None,
    };
    let mut tokenizer = tokenizer(contents, config, rules)?;
    tokenizer.with_truncation(truncation)?;
    Ok(tokenizer)
}

/// Builds the tokenizer from a SentencePiece model. The special tokens at fixed ids replace pieces
/// of the model, as in transformers.
///
/// # Errors
/// An error if neither the vocabulary nor the added tokens contain the tokens at the ends of a
/// text, or if the character map cannot be parsed; the error of
/// [`TokenizerConfig::add_tokens_with_ids`].
pub(crate) fn from_sentence_piece(
    model: SentencePieceModel,
    config: &TokenizerConfig,
    rules: UnigramRules,
) -> tokenizers::Result<Tokenizer> {
    let named = |key| (config.named(key).to_string(), 0.0);
    let (first, replaced, last) = match rules {
        UnigramRules::XlmRoberta => {
            let first = ["bos_token", "pad_token", "eos_token", "unk_token"].map(named);
            (first.to_vec(), 3, Some(named("mask_token")))
        }
        UnigramRules::Camembert => {
            let unused = |text: &str, score| (text.to_string(), score);
            let first = vec![
                unused("<s>NOTUSED", 0.0),
                named("pad_token"),
                unused("</s>NOTUSED", 0.0),
                named("unk_token"),
                unused("<unk>NOTUSED", -100.0),
            ];
            (first, 1, Some(named("mask_token")))
        }
        UnigramRules::Albert | UnigramRules::Deberta => (vec![], 0, None),
    };
    let vocab = first.into_iter().chain(model.vocab.into_iter().skip(replaced)).chain(last);
    let character_map = match &model.character_map[..] {
        [] => None,
        map => {
            Some(Precompiled::from(map).map_err(|error| format!("precompiled_charsmap: {error}"))?)
        }
    };
    let contents = Contents {
        vocab: vocab.collect(),
        unknown: model.unknown,
        character_map: character_map.map(Into::into),
        post_processor: None,
        adds_bos_and_eos: config.adds_bos_and_eos().filter(|_| rules == UnigramRules::Albert),
        added_tokens: vec![],
    };
    tokenizer(contents, config, rules)
}

/// Builds the tokenizer from the contents of a file and the rules of its class.
fn tokenizer(
    contents: Contents,
    config: &TokenizerConfig,
    rules: UnigramRules,
) -> tokenizers::Result<Tokenizer> {
    let Contents { vocab, character_map, .. } = contents;
    let unknown_token = config.named("unk_token");
    let unknown = match rules {
        UnigramRules::XlmRoberta => 3,
        UnigramRules::Camembert => {
            vocab.iter().position(|(text, _)| text == unknown_token).unwrap_or(0)
        }
        UnigramRules::Albert => 1,
        UnigramRules::Deberta => {
            let is_unknown = |(text, score): &(String, f64)| text == unknown_token && *score == 0.0;
            vocab.iter().position(is_unknown).unwrap_or(contents.unknown)
        }
    };
    let normalizers: Vec<NormalizerWrapper> = match rules {
        UnigramRules::XlmRoberta | UnigramRules::Camembert => character_map.into_iter().collect(),
        UnigramRules::Albert => {
            albert_normalizers(config)?.into_iter().chain(character_map).collect()
        }
        UnigramRules::Deberta => deberta_normalizers(config)?,
    };
    let mut tokenizer = Tokenizer::new(Unigram::from(vocab, Some(unknown), false)?);
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
    config.add_tokens_with_ids(&mut tokenizer, contents.added_tokens)?;
    let id = |key| config.token_with_id(&tokenizer, key);
    let processor = match (rules, contents.post_processor) {
        (UnigramRules::Albert, Some(processor)) => processor,
        (rules, _) => {
            let is_roberta = matches!(rules, UnigramRules::XlmRoberta | UnigramRules::Camembert);
            let (first, last, second_type) = if is_roberta {
                ("bos_token", "eos_token", "")
            } else {
                ("cls_token", "sep_token", ":1")
            };
            let [(first, first_id), (last, last_id)] = [id(first)?, id(last)?];
            let single = vec![first.clone(), "$A".to_string(), last.clone()];
            let mut pair = single.clone();
            if is_roberta {
                pair.push(last.clone());
            }
            pair.extend([format!("$B{second_type}"), format!("{last}{second_type}")]);
            let processor = TemplateProcessing::builder()
                .try_single(single)?
                .try_pair(pair)?
                .special_tokens(vec![(first, first_id), (last, last_id)])
                .build()?;
            processor.into()
        }
    };
    config.add_special_tokens(&mut tokenizer, true)?;
    let processor = match contents.adds_bos_and_eos {
        Some(added) => bos_and_eos(config, &tokenizer, added)?,
        None => processor,
    };
    tokenizer.with_post_processor(Some(processor));
    Ok(tokenizer)
}

/// The post-processor that adds `bos_token` before each text and `eos_token` after it, as
/// `update_post_processor` in transformers.
fn bos_and_eos(
    config: &TokenizerConfig,
    tokenizer: &Tokenizer,
    [bos, eos]: [bool; 2],
) -> tokenizers::Result<PostProcessorWrapper> {
    let token =
        |key, is_added: bool| is_added.then(|| config.token_with_id(tokenizer, key)).transpose();
    let (bos, eos) = (token("bos_token", bos)?, token("eos_token", eos)?);
    let around = |text: &str, type_id| {
        let bos = bos.iter().map(|(token, _)| &token[..]);
        let eos = eos.iter().map(|(token, _)| &token[..]);
        let pieces = bos.chain([text]).chain(eos);
        pieces.map(|piece| format!("{piece}:{type_id}")).collect::<Vec<_>>()
    };
    let single = around("$A", 0);
    let pair = [single.clone(), around("$B", 1)].concat();
    let builder = &mut TemplateProcessing::builder();
    let builder = builder.try_single(single)?.try_pair(pair)?;
    Ok(builder.special_tokens(bos.into_iter().chain(eos).collect::<Vec<_>>()).build()?.into())
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

/// The first normalizer that is a compiled character map of SentencePiece. The classes ignore the
/// other normalizers.
fn character_map(normalizer: Value) -> Option<serde_json::Result<NormalizerWrapper>> {
    let is_map = |normalizer: &Value| normalizer["type"] == "Precompiled";
    let map = match normalizer.get("normalizers") {
        Some(Value::Array(all)) => all.iter().find(|normalizer| is_map(normalizer)).cloned(),
        _ => Some(normalizer).filter(is_map),
    };
    map.map(serde_json::from_value)
}
