//! The model files of SentencePiece, in the format of `sentencepiece_model.proto` of SentencePiece
//! 0.2: `sentencepiece.bpe.model` of XLM-R and CamemBERT, `spiece.model` of ALBERT, and `spm.model`
//! of DeBERTa. Kudo and Richardson 2018, <https://arxiv.org/abs/1808.06226>.

use prost::Message;

use crate::text::tokenizer_config::Token;

/// The message `ModelProto`. Its other fields are ignored, as in transformers 5.23.
#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, required, tag = "2")]
    trainer: Trainer,
    #[prost(message, required, tag = "3")]
    normalizer: Normalizer,
}

/// The message `SentencePiece`.
#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, required, tag = "1")]
    text: String,
    #[prost(float, required, tag = "2")]
    score: f32,
    /// 3 for a control symbol, 4 for a user-defined symbol.
    #[prost(int32, optional, tag = "3", default = "1")]
    kind: Option<i32>,
}

impl Piece {
    /// The piece as a token, if it is a control symbol or a user-defined symbol.
    fn symbol(&self) -> Option<Token> {
        match self.kind() {
            3 => Some(Token::Text(self.text.clone())),
            4 => Some(Token::Symbol(self.text.clone())),
            _ => None,
        }
    }
}

/// The message `TrainerSpec`.
#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3", default = "1")]
    model_type: Option<i32>,
    #[prost(uint32, optional, tag = "40", default = "0")]
    unk_id: Option<u32>,
}

/// The message `NormalizerSpec`.
#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", required, tag = "2")]
    precompiled_charsmap: Vec<u8>,
}

/// The contents of a model file.
pub(crate) struct SentencePieceModel {
    /// Each piece with the logarithm of its probability.
    pub(crate) vocab: Vec<(String, f64)>,
    /// The index of the unknown token.
    pub(crate) unknown: usize,
    /// The compiled character map; empty if there is none.
    pub(crate) character_map: Vec<u8>,
    /// The control symbols and the user-defined symbols.
    pub(crate) symbols: Vec<Token>,
}

impl SentencePieceModel {
    /// Parses a model file.
    ///
    /// # Errors
    /// An error if the bytes are not in this format, or if the model is not Unigram.
    pub(crate) fn from_bytes(bytes: &[u8]) -> tokenizers::Result<Self> {
        let model = Model::decode(bytes)
            .map_err(|error| format!("expected a SentencePiece model: {error}"))?;
        let other_type = match model.trainer.model_type() {
            1 => None,
            2 => Some("BPE"),
            3 => Some("word"),
            4 => Some("character"),
            _ => Some("unknown"),
        };
        if let Some(got) = other_type {
            return Err(format!("model_type is {got}: expected Unigram").into());
        }
        if model.pieces.is_empty() {
            return Err("the model has no pieces: expected a SentencePiece model".into());
        }
        Ok(Self {
            symbols: model.pieces.iter().filter_map(Piece::symbol).collect(),
            unknown: model.trainer.unk_id() as usize,
            character_map: model.normalizer.precompiled_charsmap,
            vocab: model.pieces.into_iter().map(|p| (p.text, f64::from(p.score))).collect(),
        })
    }
}
