//! How checkpoints spell what the modules ask for: the one table of it.

use crate::{Error, Result};

/// A module's path here, its path in a checkpoint, and the config's keys for its weight's shape.
type Row = (&'static str, &'static str, &'static [&'static str]);

const VOCAB: &[&str] = &["vocab_size", "hidden_size"];
const TYPES: &[&str] = &["type_vocab_size", "hidden_size"];
const POSITIONS: &[&str] = &["max_position_embeddings", "hidden_size"];
const SQUARE: &[&str] = &["hidden_size", "hidden_size"];
const UP: &[&str] = &["intermediate_size", "hidden_size"];
const DOWN: &[&str] = &["hidden_size", "intermediate_size"];
const NORM: &[&str] = &["hidden_size"];
const LABELS: &[&str] = &["number of labels", "hidden_size"];
const PAIRS: &[&str] = &["one of two", "hidden_size"];

#[rustfmt::skip]
const MODEL: [Row; 13] = [
    ("embeddings.word_embeddings",       "embeddings.word_embeddings",          VOCAB),
    ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings",    TYPES),
    ("embeddings.position_embeddings",   "embeddings.position_embeddings",      POSITIONS),
    ("embeddings.norm",                  "embeddings.LayerNorm",                NORM),
    ("pooler",                           "pooler.dense",                        SQUARE),
    ("lm_head.transform",                "cls.predictions.transform.dense",     SQUARE),
    ("lm_head.norm",                     "cls.predictions.transform.LayerNorm", NORM),
    ("lm_head.decoder",                  "cls.predictions.decoder",             VOCAB),
    ("lm_head",                          "cls.predictions",                     VOCAB),
    ("next_sentence",                    "cls.seq_relationship",                PAIRS),
    ("classifier",                       "classifier",                          LABELS),
    ("qa_outputs",                       "qa_outputs",                          PAIRS),
    ("memory_projection",                "enc_to_dec_proj",                     SQUARE),
];

/// Below `encoder.layer.N.`, which is what a decoder's layers are called too.
#[rustfmt::skip]
const LAYER: [Row; 13] = [
    ("attention.query",           "attention.self.query",            SQUARE),
    ("attention.key",             "attention.self.key",              SQUARE),
    ("attention.value",           "attention.self.value",            SQUARE),
    ("attention.output",          "attention.output.dense",          SQUARE),
    ("attention_norm",            "attention.output.LayerNorm",      NORM),
    ("cross_attention.query",     "crossattention.self.query",       SQUARE),
    ("cross_attention.key",       "crossattention.self.key",         SQUARE),
    ("cross_attention.value",     "crossattention.self.value",       SQUARE),
    ("cross_attention.output",    "crossattention.output.dense",     SQUARE),
    ("cross_attention_norm",      "crossattention.output.LayerNorm", NORM),
    ("feed_forward.intermediate", "intermediate.dense",              UP),
    ("feed_forward.output",       "output.dense",                    DOWN),
    ("feed_forward_norm",         "output.LayerNorm",                NORM),
];

/// What stands before a checkpoint's `embeddings.` and `encoder.layer.`, and before its heads.
const PREFIXES: [(&str, &str); 6] = [
    ("", ""),
    ("bert.", ""),
    ("model.", ""),
    ("encoder.", ""),
    ("0.auto_model.", ""), // sentence-transformers, the whole chain in one file
    ("module.bert.", "module."), // PyTorch's DataParallel
];

/// Buffers that hold no weights, below the prefix.
const BUFFERS: [&str; 2] = ["embeddings.position_ids", "embeddings.token_type_ids"];

/// Heads that stand on an encoder and are no part of it.
const HEADS: [&str; 3] = ["cls.", "classifier.", "qa_outputs."];

/// What an encoder's checkpoint has that a decoder made of it does without.
const POOLER: &str = "pooler.dense.";
const NEXT_SENTENCE: &str = "cls.seq_relationship.";

/// The bias of the language model's head, which checkpoints have under either name or both.
const BIASES: [&str; 2] = ["cls.predictions.bias", "cls.predictions.decoder.bias"];

/// What stands before the encoder's and the decoder's names in an encoder-decoder checkpoint.
const ENCODER: &str = "encoder.";
const DECODER: &str = "decoder.bert.";

/// How one checkpoint spells the tensors of one model, found once from all their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Naming {
    /// What stands before the model's names.
    pub(crate) prefix: &'static str,
    /// What stands before those of its heads.
    heads: &'static str,
    /// Layer normalisations have `gamma` and `beta`, as in TensorFlow.
    gamma_beta: bool,
    /// It is a decoder's: heads are asked for, a pooler is not.
    decoder: bool,
    /// The encoder's and the decoder's tensors are the same where only one of them is there.
    tied: bool,
}

impl Naming {
    /// Of a module's file of its own, whose names are as the module asks for them.
    pub(crate) const AS_ASKED: Self =
        Self { prefix: "", heads: "", gamma_beta: false, decoder: false, tied: false };

    /// # Errors
    /// [`Error::TwoPrefixes`] if the names tell of two models; `path` is what it calls the file.
    pub(crate) fn detect(names: &[&str], path: &str) -> Result<Self> {
        let begins = |(prefix, _): &(&str, &str)| {
            let parts = ["embeddings.", "encoder.layer."].map(|part| format!("{prefix}{part}"));
            names.iter().any(|name| parts.iter().any(|part| name.starts_with(part)))
        };
        let found: Vec<_> = PREFIXES.into_iter().filter(begins).collect();
        if let &[(one, _), (other, _), ..] = &found[..] {
            let (path, prefixes) = (path.to_string(), [one, other]);
            return Err(Error::TwoPrefixes { path, prefixes });
        }
        let (prefix, heads) = found.first().copied().unwrap_or_default();
        let gamma_beta = gamma_beta(names);
        Ok(Self { prefix, heads, gamma_beta, decoder: false, tied: false })
    }

    /// The same for a decoder.
    pub(crate) fn of_decoder(self) -> Self {
        Self { decoder: true, ..self }
    }

    /// The encoder and the decoder in an encoder-decoder checkpoint.
    pub(crate) fn encoder_decoder(names: &[&str], tied: bool) -> [Self; 2] {
        let gamma_beta = gamma_beta(names);
        let naming = |prefix, heads| Self { prefix, heads, gamma_beta, decoder: false, tied };
        [naming(ENCODER, ENCODER), naming(DECODER, "decoder.").of_decoder()]
    }

    /// Another name that the checkpoint may have a tensor under.
    pub(crate) fn alias(&self, spelled: &str) -> Option<String> {
        let [bias, decoder_bias] = BIASES.map(|name| format!("{}{name}", self.heads));
        if spelled == bias {
            return Some(decoder_bias);
        }
        if spelled == decoder_bias {
            return Some(bias);
        }
        let (own, other) =
            if self.prefix == DECODER { (DECODER, ENCODER) } else { (ENCODER, DECODER) };
        let below = spelled.strip_prefix(own).filter(|_| self.tied)?;
        Some(format!("{other}{below}"))
    }

    /// How the checkpoint spells the tensor that a module asks for as `name`, and the config's
    /// keys for its shape.
    pub(crate) fn spell(&self, name: &str) -> (String, &'static [&'static str]) {
        let (module, parameter) = name.rsplit_once('.').unwrap_or((name, ""));
        let (head, rows, rest): (String, &[Row], &str) = match split_layer(module) {
            Some((number, rest)) => (format!("encoder.layer.{number}."), &LAYER, rest),
            None => (String::new(), &MODEL, module),
        };
        let row = rows.iter().find(|(here, _, _)| *here == rest);
        let &(_, spelled, shape) = row.unwrap_or(&(rest, rest, &[]));
        let parameter = match parameter {
            "weight" if self.gamma_beta && spelled.ends_with("LayerNorm") => "gamma",
            "bias" if self.gamma_beta && spelled.ends_with("LayerNorm") => "beta",
            parameter => parameter,
        };
        let prefix = match module {
            "memory_projection" => "",
            "next_sentence" | "classifier" | "qa_outputs" => self.heads,
            module if module.starts_with("lm_head") => self.heads,
            _ => self.prefix,
        };
        (format!("{prefix}{head}{spelled}.{parameter}"), shape)
    }

    /// How the checkpoint spells the word embeddings, and of the language model's head what it always
    /// has, and the matrix that it has where that is not the word embeddings'.
    pub(crate) fn words_and_scores(&self) -> [String; 3] {
        ["embeddings.word_embeddings", "lm_head.transform", "lm_head.decoder"]
            .map(|module| self.spell(&format!("{module}.weight")).0)
    }

    /// What the parameters of layer normalisation are called.
    pub(crate) fn layer_norm_names(&self) -> &'static str {
        if self.gamma_beta { "gamma and beta" } else { "weight and bias" }
    }

    /// Whether the model can do without a checkpoint's tensor of this name.
    pub(crate) fn ignores(&self, name: &str) -> bool {
        let below = |prefix: &str| name.strip_prefix(prefix).unwrap_or_default().to_string();
        let (own, head) = (below(self.prefix), below(self.heads));
        BUFFERS.contains(&own.as_str())
            || match self.decoder {
                false => HEADS.iter().any(|known| head.starts_with(known)),
                true => {
                    own.starts_with(POOLER)
                        || head.starts_with(NEXT_SENTENCE)
                        || BIASES.contains(&head.as_str())
                }
            }
    }
}

fn gamma_beta(names: &[&str]) -> bool {
    names.iter().any(|name| name.ends_with("LayerNorm.gamma"))
}

/// `encoder.layer.3.attention.query`, or a decoder's, in `3` and `attention.query`.
fn split_layer(module: &str) -> Option<(&str, &str)> {
    let below = ["encoder.layer.", "decoder.layer."];
    below.iter().find_map(|stack| module.strip_prefix(stack))?.split_once('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_eras_are_spelled() -> Result<()> {
        let modern = Naming::detect(&["embeddings.LayerNorm.weight"], "f")?;
        let early = Naming::detect(&["bert.embeddings.LayerNorm.gamma"], "f")?;
        for (name, expected_modern, expected_early) in [
            (
                "encoder.layer.11.attention.query.weight",
                "encoder.layer.11.attention.self.query.weight",
                "bert.encoder.layer.11.attention.self.query.weight",
            ),
            (
                "encoder.layer.0.feed_forward_norm.bias",
                "encoder.layer.0.output.LayerNorm.bias",
                "bert.encoder.layer.0.output.LayerNorm.beta",
            ),
            (
                "embeddings.norm.weight",
                "embeddings.LayerNorm.weight",
                "bert.embeddings.LayerNorm.gamma",
            ),
            ("pooler.bias", "pooler.dense.bias", "bert.pooler.dense.bias"),
        ] {
            assert_eq!(modern.spell(name).0, expected_modern);
            assert_eq!(early.spell(name).0, expected_early);
        }
        Ok(())
    }

    #[test]
    fn every_prefix_is_found() -> Result<()> {
        for (prefix, heads) in PREFIXES {
            for name in ["embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.bias"] {
                let naming = Naming::detect(&[&format!("{prefix}{name}"), "cls.bias"], "f")?;
                assert_eq!((naming.prefix, naming.heads), (prefix, heads), "{name}");
            }
        }
        Ok(())
    }

    #[test]
    fn two_models_in_one_file_are_an_error() {
        let names = ["embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.dense.bias"];
        assert_eq!(
            Naming::detect(&names, "f").unwrap_err().to_string(),
            "f holds two models: expected tensors under one prefix, \
             got \"embeddings.\" and \"bert.embeddings.\""
        );
    }

    #[test]
    fn only_known_tensors_are_ignored() -> Result<()> {
        let naming = Naming::detect(&["bert.embeddings.position_ids"], "f")?;
        assert!(naming.ignores("bert.embeddings.position_ids"));
        assert!(naming.ignores("cls.predictions.bias"));
        assert!(!naming.ignores("embeddings.position_ids"));
        assert!(!naming.ignores("bert.embeddings.word_embeddings.weight"));
        Ok(())
    }
}
