//! Maps the tensor names of this crate's modules to the names in checkpoints.

use crate::{CheckpointError, Result};

/// A module's path in this crate, its path in a checkpoint, and what determines each dimension of
/// its weight: a config key, or a description if no key does.
pub(crate) type Row = (&'static str, &'static str, &'static [&'static str]);

pub(crate) const VOCAB: &[&str] = &["vocab_size", "hidden_size"];
pub(crate) const TYPES: &[&str] = &["type_vocab_size", "hidden_size"];
pub(crate) const POSITIONS: &[&str] = &["max_position_embeddings", "hidden_size"];
pub(crate) const SQUARE: &[&str] = &["hidden_size", "hidden_size"];
pub(crate) const QUERY: &[&str] = &["num_attention_heads · head_dim", "hidden_size"];
pub(crate) const KEY_VALUE: &[&str] = &["num_key_value_heads · head_dim", "hidden_size"];
pub(crate) const ATTENTION_OUTPUT: &[&str] = &["hidden_size", "num_attention_heads · head_dim"];
pub(crate) const HEAD: &[&str] = &["head_dim"];
pub(crate) const UP: &[&str] = &["intermediate_size", "hidden_size"];
pub(crate) const DOWN: &[&str] = &["hidden_size", "intermediate_size"];
// For models whose embeddings have `embedding_size` values, such as ALBERT. `PROJECTION` is the map
// from `embedding_size` to `hidden_size`, `NARROWING` the map back.
pub(crate) const PROJECTION: &[&str] = &["hidden_size", "embedding_size"];
pub(crate) const NARROW_VOCAB: &[&str] = &["vocab_size", "embedding_size"];
pub(crate) const NARROW_TYPES: &[&str] = &["type_vocab_size", "embedding_size"];
pub(crate) const NARROW_POSITIONS: &[&str] = &["max_position_embeddings", "embedding_size"];
pub(crate) const NARROW_NORM: &[&str] = &["embedding_size"];
pub(crate) const NARROWING: &[&str] = &["embedding_size", "hidden_size"];
pub(crate) const NORM: &[&str] = &["hidden_size"];
pub(crate) const LABELS: &[&str] = &["number of labels", "hidden_size"];
pub(crate) const TWO_OUTPUTS: &[&str] = &["number of outputs", "hidden_size"];

/// See [`Names::fused`].
pub(crate) type FusedRow = (&'static str, &'static str, usize, usize);

/// A tensor in a checkpoint.
pub(crate) struct CheckpointTensor {
    pub(crate) tensor: String,
    /// The index of a part along the first axis, and the number of parts; `None`: the whole tensor.
    pub(crate) part: Option<(usize, usize)>,
    /// What determines each dimension, as in [`Row`].
    pub(crate) keys: &'static [&'static str],
}

/// The names of an architecture's tensors in checkpoints.
#[derive(Debug)]
pub(crate) struct Names {
    /// The prefix of the encoder's tensors in a checkpoint with a head.
    pub(crate) wrapper: &'static str,
    /// The modules of the encoder outside its layers.
    pub(crate) model: &'static [Row],
    /// The part of a layer's path before its number. A module of a layer is
    /// `{layers}{number}.{module}`, after the model's prefix.
    pub(crate) layers: &'static str,
    /// The modules of a layer. BERT's decoders have the same path and names.
    pub(crate) layer: &'static [Row],
    /// The modules of a layer whose weights are parts of one tensor: the path of a module in this
    /// crate, the path of the tensor's module in a checkpoint, the index of the part along the
    /// first axis, and the number of parts.
    pub(crate) fused: &'static [FusedRow],
    /// The modules of the heads. An encoder ignores tensors whose names have the same first
    /// component (the part before the first dot) as the checkpoint path of a row.
    pub(crate) heads: &'static [Row],
    /// The names of other tensors to ignore: the first component of the names of heads that this
    /// crate does not have, and the paths of encoder modules that may be unused.
    pub(crate) ignored: &'static [&'static str],
}

impl Names {
    /// No translation: the file of a single module, such as Dense, uses this crate's names.
    const NONE: Self = Self {
        wrapper: "",
        model: &[],
        layers: "",
        layer: &[],
        fused: &[],
        heads: &[],
        ignored: &[],
    };

    /// Counts the modules (outside the layers, of the first layer, of the heads) with tensors in
    /// `stored` under each known prefix, and returns the largest count.
    fn count_modules(&self, stored: &[&str]) -> usize {
        let of_layer = self.layer.iter().map(|row| row.1).chain(self.fused.iter().map(|row| row.1));
        let of_layer = of_layer.map(|module| format!("{}0.{module}.", self.layers));
        let others = self.model.iter().map(|row| format!("{}.", row.1));
        let own: Vec<String> = of_layer.chain(others).collect();
        let of_heads: Vec<String> = self.heads.iter().map(|row| format!("{}.", row.1)).collect();
        let count = |modules: &[String], prefix: &str| {
            let is_below = |name: &str, module: &str| {
                name.strip_prefix(prefix).is_some_and(|name| name.starts_with(module))
            };
            let is_stored = |module: &&String| stored.iter().any(|name| is_below(name, module));
            modules.iter().filter(is_stored).count()
        };
        let prefixes = self.prefixes();
        let counts = prefixes.iter().map(|(own_prefix, heads_prefix)| {
            count(&own, own_prefix) + count(&of_heads, heads_prefix)
        });
        counts.max().unwrap_or(0)
    }

    /// Known prefixes of the encoder's tensors, each with the prefix of the heads' tensors.
    fn prefixes(&self) -> [(String, &'static str); 6] {
        let wrapper = self.wrapper;
        [
            (String::new(), ""),
            (wrapper.to_string(), ""),
            ("model.".to_string(), ""),
            ("encoder.".to_string(), ""),
            ("0.auto_model.".to_string(), ""), // a sentence-transformers pipeline in one file
            (format!("module.{wrapper}"), "module."), // PyTorch's DataParallel
        ]
    }
}

/// The names of buffers without the prefix. Buffers hold no weights.
const BUFFERS: [&str; 3] =
    ["embeddings.position_ids", "embeddings.token_type_ids", "stats_last_nonzero"];

/// The end of the names of the buffers of frequencies in older checkpoints of decoders. The
/// frequencies are those of the config.
const FREQUENCIES: &str = ".rotary_emb.inv_freq";

/// The prefix of the next sentence head's tensors. A decoder that is initialised from an encoder's
/// checkpoint does not need them.
const NEXT_SENTENCE: &str = "cls.seq_relationship.";

/// The map from an encoder's hidden states to the width of the decoder, in an encoder-decoder
/// checkpoint. Its tensors have no prefix.
const MEMORY_PROJECTION: Row =
    ("memory_projection", "enc_to_dec_proj", &["decoder.hidden_size", "encoder.hidden_size"]);

/// The map from an encoder's hidden states to the vectors of the tokens, in a checkpoint of
/// Stanford's ColBERT. Its tensors have no prefix.
const COLBERT_PROJECTION: Row = ("colbert_projection", "linear", &["dim", "hidden_size"]);

/// The prefixes of the encoder and the decoder in an encoder-decoder checkpoint.
const ENCODER: &str = "encoder.";
const DECODER: &str = "decoder.bert.";

/// The naming scheme of one model in a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Naming {
    names: &'static Names,
    /// The prefix of the model's tensors.
    pub(crate) prefix: String,
    /// The prefix of its heads' tensors.
    heads: &'static str,
    /// Whether the parameters of layer normalisation are named `gamma` and `beta`, as in
    /// TensorFlow.
    gamma_beta: bool,
    /// Whether the model is a decoder, which needs the language model's head, and no pooler.
    decoder: bool,
    /// Whether the encoder and the decoder share weights. A tensor that one of them lacks is then
    /// read from the other.
    tied: bool,
}

impl Naming {
    /// The naming of a module's own file, which uses this crate's names.
    pub(crate) fn identity() -> Self {
        Self::new(&Names::NONE, String::new(), "", false)
    }

    fn new(names: &'static Names, prefix: String, heads: &'static str, gamma_beta: bool) -> Self {
        Self { names, prefix, heads, gamma_beta, decoder: false, tied: false }
    }

    /// Detects how the tensors of a checkpoint are named. `stored` are its tensor names, `all` the
    /// alternative [`Names`] of its architecture, and `path` names the file in errors. Uses the
    /// `Names` with the most modules in the checkpoint; of several such, the first.
    ///
    /// # Errors
    /// [`CheckpointError::TwoPrefixes`] if the tensors have two of the known prefixes.
    pub(crate) fn detect(all: &'static [Names], stored: &[&str], path: &str) -> Result<Self> {
        let names = match all {
            [names] => names,
            // `max_by_key` returns the last maximum.
            _ => all
                .iter()
                .rev()
                .max_by_key(|names| names.count_modules(stored))
                .unwrap_or(&Names::NONE),
        };
        let is_used = |(prefix, _): &(String, &str)| {
            let parts = ["embeddings.", names.layers].map(|part| format!("{prefix}{part}"));
            stored.iter().any(|name| parts.iter().any(|part| name.starts_with(part)))
        };
        let mut found = names.prefixes().into_iter().filter(is_used);
        let (prefix, heads) = found.next().unwrap_or_default();
        if let Some((other, _)) = found.find(|(other, _)| *other != prefix) {
            return Err(CheckpointError::TwoPrefixes {
                path: path.to_string(),
                prefixes: [prefix, other],
            }
            .into());
        }
        Ok(Self::new(names, prefix, heads, gamma_beta(stored)))
    }

    /// The same naming for a decoder.
    pub(crate) fn of_decoder(self) -> Self {
        Self { decoder: true, ..self }
    }

    /// The namings of the encoder and the decoder in an encoder-decoder checkpoint. `names` are
    /// those of both.
    pub(crate) fn encoder_decoder(names: &'static Names, stored: &[&str], tied: bool) -> [Self; 2] {
        let naming = |prefix: &str, heads| {
            let naming = Self::new(names, prefix.to_string(), heads, gamma_beta(stored));
            Self { tied, ..naming }
        };
        [naming(ENCODER, ENCODER), naming(DECODER, "decoder.").of_decoder()]
    }

    /// An alternative checkpoint name of a tensor: the other name of the language model head's
    /// bias, or the name in the other model if the encoder and the decoder share weights.
    pub(crate) fn alias(&self, tensor: &str) -> Option<String> {
        let [bias, decoder_bias] = self.lm_head_biases();
        if tensor == bias {
            return Some(decoder_bias);
        }
        if tensor == decoder_bias {
            return Some(bias);
        }
        let (own, other) =
            if self.prefix == DECODER { (DECODER, ENCODER) } else { (ENCODER, DECODER) };
        let below = tensor.strip_prefix(own).filter(|_| self.tied)?;
        Some(format!("{other}{below}"))
    }

    /// The two names of the language model head's bias. Checkpoints have either or both.
    fn lm_head_biases(&self) -> [String; 2] {
        ["lm_head.bias", "lm_head.decoder.bias"].map(|name| self.checkpoint_name(name).0)
    }

    /// The checkpoint's tensor that a module requests as `name`.
    pub(crate) fn find(&self, name: &str) -> CheckpointTensor {
        let (tensor, keys) = self.checkpoint_name(name);
        let (module, parameter) = name.rsplit_once('.').unwrap_or((name, ""));
        let fused = split_layer(module).and_then(|(number, rest)| {
            let row = self.names.fused.iter().find(|row| row.0 == rest)?;
            let path = format!("{}{}{number}.{}", self.prefix, self.names.layers, row.1);
            Some((format!("{path}.{parameter}"), (row.2, row.3)))
        });
        match fused {
            None => CheckpointTensor { tensor, part: None, keys },
            Some((tensor, part)) => CheckpointTensor { tensor, part: Some(part), keys: &[] },
        }
    }

    /// The checkpoint's name for the tensor that a module requests as `name`, and what determines
    /// its shape. For a module of [`Names::fused`] use [`Self::find`]; here the result has no
    /// meaning.
    pub(crate) fn checkpoint_name(&self, name: &str) -> (String, &'static [&'static str]) {
        let (module, parameter) = name.rsplit_once('.').unwrap_or((name, ""));
        let names = self.names;
        let find = |rows: &[Row], path: &str| rows.iter().copied().find(|row| row.0 == path);
        let unknown = |path| (path, path, &[] as &[_]);
        let (prefix, (_, stored, shape)) = if let Some((number, rest)) = split_layer(module) {
            let path = format!("{}{}{number}.", self.prefix, names.layers);
            (path, find(names.layer, rest).unwrap_or(unknown(rest)))
        } else if let Some(row) = find(names.heads, module) {
            (self.heads.to_string(), row)
        } else if let Some(row) = find(&[MEMORY_PROJECTION, COLBERT_PROJECTION], module) {
            (String::new(), row)
        } else {
            (self.prefix.clone(), find(names.model, module).unwrap_or(unknown(module)))
        };
        let parameter = match parameter {
            "weight" if self.gamma_beta && stored.ends_with("LayerNorm") => "gamma",
            "bias" if self.gamma_beta && stored.ends_with("LayerNorm") => "beta",
            parameter => parameter,
        };
        let separator = if parameter.is_empty() { "" } else { "." }; // a tensor outside modules
        (format!("{prefix}{stored}{separator}{parameter}"), shape)
    }

    /// The checkpoint's names of the word embeddings, of the language model head's transform, and
    /// of its decoder matrix, which a tied head lacks.
    pub(crate) fn word_and_head_names(&self) -> [String; 3] {
        ["embeddings.word_embeddings", "lm_head.transform", "lm_head.decoder"]
            .map(|module| self.checkpoint_name(&format!("{module}.weight")).0)
    }

    /// The names of the layer normalisation parameters.
    pub(crate) fn layer_norm_names(&self) -> &'static str {
        if self.gamma_beta { "gamma and beta" } else { "weight and bias" }
    }

    /// Whether the checkpoint's tensor of this name is known to be unneeded.
    pub(crate) fn ignores(&self, name: &str) -> bool {
        let own = name.strip_prefix(&self.prefix).unwrap_or_default();
        let head = name.strip_prefix(self.heads).unwrap_or_default();
        let pooler = self.names.model.iter().filter(|row| row.0 == "pooler");
        let is_pooler = || {
            pooler.clone().any(|row| own.strip_prefix(row.1).is_some_and(|p| p.starts_with('.')))
        };
        // The first part of a head's path, such as `cls` of `cls.predictions.decoder`.
        let start = |path: &'static str| path.split('.').next().unwrap_or(path);
        let is_head = || {
            let known = self.names.heads.iter().map(|row| start(row.1));
            let known = known.chain(self.names.ignored.iter().copied());
            // The file of a single module has no projection of ColBERT.
            let is_encoder = !self.names.model.is_empty();
            let mut known = known.chain(is_encoder.then_some(COLBERT_PROJECTION.1));
            head.split_once('.').is_some_and(|(beginning, _)| known.any(|head| head == beginning))
        };
        let is_unused = || {
            let is_below = |path: &&str| own.strip_prefix(path).is_some_and(|p| p.starts_with('.'));
            self.names.ignored.iter().any(is_below)
        };
        BUFFERS.contains(&own)
            || own.ends_with(FREQUENCIES)
            || is_pooler()
            || is_unused()
            || if self.decoder {
                head.starts_with(NEXT_SENTENCE)
                    || self.lm_head_biases().iter().any(|bias| bias == name)
            } else {
                is_head()
            }
    }
}

fn gamma_beta(names: &[&str]) -> bool {
    names.iter().any(|name| name.ends_with("LayerNorm.gamma"))
}

/// Splits `encoder.layer.3.attention.query` into `3` and `attention.query`.
fn split_layer(module: &str) -> Option<(&str, &str)> {
    module.strip_prefix("encoder.layer.")?.split_once('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::bert;

    fn detect(stored: &[&str]) -> Result<Naming> {
        static NAMES: [Names; 1] = [bert::NAMES];
        Naming::detect(&NAMES, stored, "f")
    }

    #[test]
    fn weight_and_bias_or_gamma_and_beta_names_are_detected() -> Result<()> {
        let modern = detect(&["embeddings.LayerNorm.weight"])?;
        let tensorflow = detect(&["bert.embeddings.LayerNorm.gamma"])?;
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
            assert_eq!(modern.checkpoint_name(name).0, expected_modern);
            assert_eq!(tensorflow.checkpoint_name(name).0, expected_tensorflow);
        }
        Ok(())
    }

    #[test]
    fn every_prefix_is_detected() -> Result<()> {
        for (prefix, heads) in bert::NAMES.prefixes() {
            for name in ["embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.bias"] {
                let naming = detect(&[&format!("{prefix}{name}"), "cls.bias"])?;
                assert_eq!((&naming.prefix, naming.heads), (&prefix, heads), "{name}");
            }
        }
        Ok(())
    }

    #[test]
    fn two_models_in_one_file_are_an_error() {
        let names = ["embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.dense.bias"];
        assert_eq!(
            detect(&names).unwrap_err().to_string(),
            "f holds two models: expected tensors under one prefix, \
             got \"embeddings.\" and \"bert.embeddings.\""
        );
    }

    #[test]
    fn only_known_tensors_are_ignored() -> Result<()> {
        let naming = detect(&["bert.embeddings.position_ids"])?;
        assert!(naming.ignores("bert.embeddings.position_ids"));
        assert!(naming.ignores("cls.predictions.bias"));
        assert!(!naming.ignores("embeddings.position_ids"));
        assert!(!naming.ignores("bert.embeddings.word_embeddings.weight"));
        Ok(())
    }
}
