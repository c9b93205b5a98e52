//! The crate `tokenizers` keeps its tokens in hash maps, whose order differs between processes.
//! These functions remove the cases in which that order decides a result or an error.

use std::collections::{BTreeMap, btree_map::Entry};

use serde::{Deserialize, de::IgnoredAny};
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizedString, Normalizer, NormalizerWrapper, Tokenizer,
};

use crate::text::tokenizer_json::model_type;

/// The error for a model in a `tokenizer.json` that lacks a key; `None` if it lacks none. Of
/// several keys, the crate `tokenizers` names any.
pub(crate) fn missing_key(json: &[u8]) -> Option<tokenizers::Error> {
    #[derive(Deserialize)]
    struct File {
        model: BTreeMap<String, IgnoredAny>,
    }
    let keys: &[&str] = match model_type(json).ok()?.as_str() {
        "WordPiece" => {
            &["vocab", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word"]
        }
        "WordLevel" => &["vocab", "unk_token"],
        _ => return None,
    };
    let File { model } = serde_json::from_slice(json).ok()?;
    let missing = keys.iter().find(|key| !model.contains_key(**key))?;
    Some(format!("the model has no {missing}: expected the keys {}", keys.join(", ")).into())
}

/// Checks that the tokens of a vocabulary have distinct ids: of two tokens with one id, hash order
/// decides which is the text of the id.
///
/// # Errors
/// An error that names two tokens with the same id.
pub(crate) fn check_ids<'a>(
    vocab: impl IntoIterator<Item = (&'a String, &'a u32)>,
) -> tokenizers::Result<()> {
    let mut tokens: Vec<(u32, &str)> =
        vocab.into_iter().map(|(text, &id)| (id, &text[..])).collect();
    // The ids of most vocabularies of n tokens are those below n. Only other ids are sorted.
    let mut found = vec![false; tokens.len()];
    let mut is_new =
        |id: u32| found.get_mut(id as usize).is_some_and(|found| !std::mem::replace(found, true));
    if tokens.iter().all(|&(id, _)| is_new(id)) {
        return Ok(());
    }
    tokens.sort_unstable();
    match tokens.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(()),
        Some(pair) => {
            let [(id, first), (_, second)] = [pair[0], pair[1]];
            Err(format!("tokens {first:?} and {second:?} have the id {id}: expected distinct ids")
                .into())
        }
    }
}

/// [`check_ids`] of the vocabulary of a tokenizer, without its added tokens.
pub(crate) fn check_ids_of(tokenizer: &Tokenizer) -> tokenizers::Result<()> {
    // `n` tokens have distinct ids if each id below `n` has a token. Only ids with gaps need a copy
    // of the vocabulary.
    let mut ids = 0..tokenizer.get_vocab_size(false) as u32;
    let model = tokenizer.get_model();
    let distinct = ids.all(|id| model.id_to_token(id).is_some());
    if distinct { Ok(()) } else { check_ids(&tokenizer.get_vocab(false)) }
}

/// Chooses one of several added tokens that are equal after normalisation, such as `WORD` and
/// `Wörd` under a normalizer that lowercases and strips accents. Such tokens are matched in the
/// normalised text by their normalised form, and hash order decides which of them is found. Here
/// it is the token that is spelled like the form, or else the one with the lowest id.
///
/// Call it last: `Tokenizer::with_normalizer` and `Tokenizer::add_tokens` undo the choice.
///
/// # Errors
/// An error that names two tokens if no choice makes the forms distinct; the normalizer's error.
pub(crate) fn choose_added_tokens(tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
    let Some(normalizer) = tokenizer.get_normalizer() else { return Ok(()) };
    let added: BTreeMap<u32, AddedToken> =
        tokenizer.get_added_tokens_decoder().into_iter().collect();
    let mut found: BTreeMap<String, &str> = BTreeMap::new();
    let mut hidden: BTreeMap<&str, String> = BTreeMap::new();
    for AddedToken { content, .. } in added.values().filter(|token| token.normalized) {
        let mut form = NormalizedString::from(&content[..]);
        normalizer.normalize(&mut form)?;
        match found.entry(form.get().to_string()) {
            Entry::Vacant(none) => {
                none.insert(content);
            }
            Entry::Occupied(mut other) => {
                let form = other.key().clone();
                let loser = if form == *content { other.insert(content) } else { content };
                hidden.insert(loser, form);
            }
        }
    }
    if hidden.is_empty() {
        return Ok(());
    }
    let clash = |first: &str, second: &str| {
        format!(
            "added tokens {first:?} and {second:?} are equal after normalisation: expected distinct \
             tokens"
        )
    };
    if let Some((first, second)) = hidden.keys().find_map(|text| Some((text, found.get(*text)?))) {
        return Err(clash(first, second).into());
    }
    // A hidden token is matched by its own spelling, which the normalizer removes from texts.
    let mut vocabulary = AddedVocabulary::new();
    let unless_hidden = UnlessHidden { normalizer, hidden: &hidden };
    vocabulary.add_tokens(added.values().cloned(), tokenizer.get_model(), Some(&unless_hidden))?;
    let changed = added.iter().find(|(id, token)| {
        vocabulary.token_to_id(&token.content, tokenizer.get_model()) != Some(**id)
    });
    if changed.is_some()
        && let Some((text, form)) = hidden.first_key_value()
    {
        return Err(clash(text, found[form]).into());
    }
    vocabulary.set_encode_special_tokens(tokenizer.get_encode_special_tokens());
    tokenizer.with_added_vocabulary(vocabulary);
    Ok(())
}

/// A normalizer that does not change the tokens in `hidden`.
struct UnlessHidden<'a> {
    normalizer: &'a NormalizerWrapper,
    hidden: &'a BTreeMap<&'a str, String>,
}

impl Normalizer for UnlessHidden<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        if self.hidden.contains_key(text.get()) { Ok(()) } else { self.normalizer.normalize(text) }
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{
        models::{bpe::Vocab, wordpiece::WordPiece},
        normalizers::{BertNormalizer, Replace, Sequence},
        pre_tokenizers::bert::BertPreTokenizer,
    };

    use super::*;

    fn without_choice(
        vocab: &[(&str, u32)],
        normalizer: impl Into<NormalizerWrapper>,
        added: &[AddedToken],
    ) -> tokenizers::Result<Tokenizer> {
        let vocab: Vocab = vocab.iter().map(|&(text, id)| (text.to_string(), id)).collect();
        let mut tokenizer = Tokenizer::new(WordPiece::builder().vocab(vocab).build()?);
        tokenizer.with_normalizer(Some(normalizer))?;
        tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
        tokenizer.add_tokens(added.to_vec())?;
        Ok(tokenizer)
    }

    fn tokenizer(
        normalizer: impl Into<NormalizerWrapper>,
        added: &[AddedToken],
    ) -> tokenizers::Result<Tokenizer> {
        let vocab = [("[UNK]", 0), ("a", 1), ("word", 2)];
        let mut tokenizer = without_choice(&vocab, normalizer, added)?;
        choose_added_tokens(&mut tokenizer)?;
        Ok(tokenizer)
    }

    /// The hash order differs between tokenizers of one process, too.
    #[test]
    fn the_lowest_id_or_the_spelling_decides_between_equal_added_tokens() -> tokenizers::Result<()>
    {
        let added = |text: &str| AddedToken::from(text, false);
        for (tokens, ids) in [
            (["FOO", "Fóo", "fOO", "Bar"], [3, 3, 3, 6]),
            (["Fóo", "FOO", "fOO", "Bar"], [3, 3, 3, 6]),
            (["FOO", "foo", "Fóo", "Bar"], [4, 4, 4, 6]),
            // The vocabulary has the token.
            (["WORD", "word", "Wörd", "Bar"], [2, 2, 2, 5]),
        ] {
            for _ in 0..20 {
                let tokenizer = tokenizer(BertNormalizer::default(), &tokens.map(added))?;
                let encoding = tokenizer.encode(tokens.join(" "), false)?;
                assert_eq!(encoding.get_ids(), ids, "{tokens:?}");
                for token in tokens {
                    let id = tokenizer.token_to_id(token).unwrap();
                    assert!(tokenizer.get_added_tokens_decoder()[&id].content == token);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn options_and_special_tokens_are_kept() -> tokenizers::Result<()> {
        let single = AddedToken::from("FOO", false).single_word(true);
        let special = AddedToken::from("<s>", true);
        let tokens = [single, AddedToken::from("Fóo", false), special];
        let tokenizer = tokenizer(BertNormalizer::default(), &tokens)?;
        assert_eq!(tokenizer.encode("foo afoo<s>", false)?.get_ids(), [3, 0, 5]);
        assert_eq!(tokenizer.decode(&[5, 1], true)?, "a");
        assert_eq!(tokenizer.decode(&[4, 1], true)?, "Fóo a");
        Ok(())
    }

    /// `A` becomes `b`, and `c` becomes `A`.
    #[test]
    fn tokens_that_stay_equal_are_an_error() -> tokenizers::Result<()> {
        let replace = [Replace::new("A", "b")?, Replace::new("c", "A")?];
        let normalizer = Sequence::new(replace.into_iter().map(Into::into).collect());
        let added = ["b", "A", "c"].map(|text| AddedToken::from(text, false));
        assert_eq!(
            tokenizer(normalizer, &added).map(|_| ()).unwrap_err().to_string(),
            "added tokens \"A\" and \"c\" are equal after normalisation: expected distinct tokens"
        );
        Ok(())
    }

    /// The vocabulary has two tokens and no id from 1 to 4: `FOO` has the id 2, `Fóo` the id 6.
    #[test]
    fn a_choice_that_would_change_an_id_is_an_error() -> tokenizers::Result<()> {
        let added = |text: &str| AddedToken::from(text, false);
        let vocab = [("[UNK]", 0), ("a", 5)];
        let tokens = [added("FOO"), added("a")];
        let mut tokenizer = without_choice(&vocab, BertNormalizer::default(), &tokens)?;
        tokenizer.add_tokens([added("Fóo")])?;
        assert_eq!(["FOO", "Fóo"].map(|token| tokenizer.token_to_id(token)), [Some(2), Some(6)]);
        assert_eq!(
            choose_added_tokens(&mut tokenizer).unwrap_err().to_string(),
            "added tokens \"Fóo\" and \"FOO\" are equal after normalisation: expected distinct tokens"
        );
        Ok(())
    }

    #[test]
    fn the_first_missing_key_of_a_model_is_named() {
        let error = |json: &str| missing_key(json.as_bytes()).map(|error| error.to_string());
        assert_eq!(
            error(r#"{"model": {"type": "WordPiece", "vocab": {}}}"#).unwrap(),
            "the model has no unk_token: expected the keys vocab, unk_token, \
             continuing_subword_prefix, max_input_chars_per_word"
        );
        assert_eq!(
            error(r#"{"model": {"type": "WordLevel"}}"#).unwrap(),
            "the model has no vocab: expected the keys vocab, unk_token"
        );
        assert_eq!(error(r#"{"model": {"vocab": {}, "unk_token": "a"}}"#), None);
        assert_eq!(error(r#"{"model": {"type": "BPE"}}"#), None);
    }

    #[test]
    fn two_tokens_with_one_id_are_an_error_that_names_them() {
        let vocab = [("b", 1), ("c", 2), ("a", 1), ("d", 2)].map(|(t, id)| (t.to_string(), id));
        let error = check_ids(vocab.iter().map(|(text, id)| (text, id))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tokens \"a\" and \"b\" have the id 1: expected distinct ids"
        );
        check_ids(vocab[..2].iter().map(|(text, id)| (text, id))).unwrap();
    }
}
