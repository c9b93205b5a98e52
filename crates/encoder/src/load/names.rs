//! Maps the tensor names of this crate's modules to the names in checkpoints.

use crate::{Error, Result};

/// A module's path in this crate, its path in a checkpoint, and the config keys of its weight's
/// shape.
type Row = (&'static str, &'static str, &'static [&'static str]);

const VOCAB: &[&str] = &["vocab_size", "hidden_size"];
const TYPES: &[&str] = &["type_vocab_size", "hidden_size"];
const POSITIONS: &[&str] = &["max_position_embeddings", "hidden_size"];
const SQUARE: &[&str] = &["hidden_size", "hidden_size"];
const UP: &[&str] = &["intermediate_size", "hidden_size"];
const DOWN: &[&str] = &["hidden_size", "intermediate_size"];
const NORM: &[&str] = &["hidden_size"];
const LABELS: &[&str] = &["number of labels", "hidden_size"];
const TWO_OUTPUTS: &[&str] = &["number of outputs", "hidden_size"];

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
    ("next_sentence",                    "cls.seq_relationship",                TWO_OUTPUTS),
    ("classifier",                       "classifier",                          LABELS),
    ("qa_outputs",                       "qa_outputs",                          TWO_OUTPUTS),
    ("memory_projection",                "enc_to_dec_proj",                     SQUARE),
];

/// The modules below `encoder.layer.N.`. Checkpoints use this path for a decoder's layers, too.
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

/// Known prefixes of `embeddings.` and `encoder.layer.`, each with the prefix of the heads' names.
const PREFIXES: [(&str, &str); 6] = [
    ("", ""),
    ("bert.", ""),
    ("model.", ""),
    ("encoder.", ""),
    ("0.auto_model.", ""),       // a sentence-transformers pipeline in one file
    ("module.bert.", "module."), // PyTorch's DataParallel
];

/// The names of buffers without the prefix. Buffers hold no weights.
const BUFFERS: [&str; 2] = ["embeddings.position_ids", "embeddings.token_type_ids"];

/// The heads of an encoder, which the encoder itself does not need.
const HEADS: [&str; 3] = ["cls.", "classifier.", "qa_outputs."];

/// Tensors that a decoder does not need if it is initialised from an encoder's checkpoint.
const POOLER: &str = "pooler.dense.";
const NEXT_SENTENCE: &str = "cls.seq_relationship.";

/// The two names of the language model head's bias. Checkpoints have either or both.
const BIASES: [&str; 2] = ["cls.predictions.bias", "cls.predictions.decoder.bias"];

/// The prefixes of the encoder and the decoder in an encoder-decoder checkpoint.
const ENCODER: &str = "encoder.";
const DECODER: &str = "decoder.bert.";

/// The naming scheme of one model in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Naming {
    /// The prefix of the model's tensors.
    pub(crate) prefix: &'static str,
    /// The prefix of its heads' tensors.
    heads: &'static str,
    /// Layer normalisation parameters are named `gamma` and `beta`, as in TensorFlow.
    gamma_beta: bool,
    /// The model is a decoder: it needs the language model's head, and no pooler.
    decoder: bool,
    /// The encoder and the decoder share weights: a tensor that one of them lacks is read from the
    /// other.
    tied: bool,
}

impl Naming {
    /// The naming of a module's own file, which uses this crate's names.
    pub(crate) const IDENTITY: Self =
        Self { prefix: "", heads: "", gamma_beta: false, decoder: false, tied: false };

    /// Detects the naming scheme from the names of all tensors; `path` names the file in errors.
    ///
    /// # Errors
    /// [`Error::TwoPrefixes`] if the names have two of the known prefixes.
    pub(crate) fn detect(names: &[&str], path: &str) -> Result<Self> {
        let is_used = |(prefix, _): &(&str, &str)| {
            let parts = ["embeddings.", "encoder.layer."].map(|part| format!("{prefix}{part}"));
            names.iter().any(|name| parts.iter().any(|part| name.starts_with(part)))
        };
        let found: Vec<_> = PREFIXES.into_iter().filter(is_used).collect();
        if let &[(one, _), (other, _), ..] = &found[..] {
            let (path, prefixes) = (path.to_string(), [one, other]);
            return Err(Error::TwoPrefixes { path, prefixes });
        }
        let (prefix, heads) = found.first().copied().unwrap_or_default();
        let gamma_beta = gamma_beta(names);
        Ok(Self { prefix, heads, gamma_beta, decoder: false, tied: false })
    }

    /// The same naming for a decoder.
    pub(crate) fn of_decoder(self) -> Self {
        Self { decoder: true, ..self }
    }

    /// The namings of the encoder and the decoder in an encoder-decoder checkpoint.
    pub(crate) fn encoder_decoder(names: &[&str], tied: bool) -> [Self; 2] {
        let gamma_beta = gamma_beta(names);
        let naming = |prefix, heads| Self { prefix, heads, gamma_beta, decoder: false, tied };
        [naming(ENCODER, ENCODER), naming(DECODER, "decoder.").of_decoder()]
    }

    /// An alternative checkpoint name of a tensor: the bias's other name, or the tied tensor.
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

    /// The checkpoint's name for the tensor that a module requests as `name`, and the config keys
    /// of its shape.
    pub(crate) fn spell(&self, name: &str) -> (String, &'static [&'static str]) {
        let (module, parameter) = name.rsplit_once('.').unwrap_or((name, ""));
        let (head, rows, rest): (String, &[Row], &str) = match split_layer(module) {
            Some((number, rest)) => (format!("encoder.layer.{number}."), &LAYER, rest),
            None => (String::new(), &MODEL, module),
        };
        let row = rows.iter().find(|(path, _, _)| *path == rest);
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

    /// The checkpoint's names of the word embeddings, of the language model head's transform, and
    /// of its decoder matrix, which a tied head lacks.
    pub(crate) fn word_and_head_names(&self) -> [String; 3] {
        ["embeddings.word_embeddings", "lm_head.transform", "lm_head.decoder"]
            .map(|module| self.spell(&format!("{module}.weight")).0)
    }

    /// The names of the layer normalisation parameters.
    pub(crate) fn layer_norm_names(&self) -> &'static str {
        if self.gamma_beta { "gamma and beta" } else { "weight and bias" }
    }

    /// Whether the checkpoint's tensor of this name is known to be unneeded.
    pub(crate) fn ignores(&self, name: &str) -> bool {
        let without = |prefix: &str| name.strip_prefix(prefix).unwrap_or_default().to_string();
        let (own, head) = (without(self.prefix), without(self.heads));
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

/// Splits `encoder.layer.3.attention.query`, or `decoder.layer.3…`, into `3` and `attention.query`.
fn split_layer(module: &str) -> Option<(&str, &str)> {
    let stacks = ["encoder.layer.", "decoder.layer."];
    stacks.iter().find_map(|stack| module.strip_prefix(stack))?.split_once('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_and_bias_or_gamma_and_beta_names_are_detected() -> Result<()> {
        let modern = Naming::detect(&["embeddings.LayerNorm.weight"], "f")?;
        let tensorflow = Naming::detect(&["bert.embeddings.LayerNorm.gamma"], "f")?;
        for (name, expected_modern, expected_tensorflow) in [
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
            assert_eq!(tensorflow.spell(name).0, expected_tensorflow);
        }
        Ok(())
    }

    #[test]
    fn every_prefix_is_detected() -> Result<()> {
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
