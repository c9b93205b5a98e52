//! The tokenizer classes of transformers 5.23 whose normalizer, pre-tokenizer and post-processor
//! are defined in Python code, not in `tokenizer.json`. From a `tokenizer.json`, these classes read
//! only the vocabulary with its merges, the added tokens and the truncation side. The classes of
//! XLM-R, CamemBERT and ALBERT also read the compiled character map; the class of ALBERT also reads
//! the post-processor.

/// Classes with the same rules.
#[derive(Debug)]
pub(crate) struct TokenizerClass {
    /// The names of the classes, without the suffix `Fast`.
    names: &'static [&'static str],
    /// The algorithm of the vocabulary.
    pub(crate) algorithm: Algorithm,
    /// The defaults of the named special tokens: key and text.
    pub(crate) special_tokens: &'static [(&'static str, &'static str)],
    /// Whether tokens of the second text of a pair have type 1.
    pub(crate) has_type_ids: bool,
}

/// The algorithm that splits a text into the tokens of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// [`super::word_piece`]
    WordPiece(SpecialTokenLayout),
    /// [`super::byte_bpe`]
    ByteBpe,
    /// [`super::unigram`]
    Unigram(UnigramRules),
}

/// The special tokens around one text, and around a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpecialTokenLayout {
    /// `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`
    Bert,
    /// `<s> A </s>`, `<s> A </s> </s> B </s>`
    Roberta,
}

/// The rules of a tokenizer with a Unigram vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnigramRules {
    XlmRoberta,
    /// As XLM-R, but some tokens of the vocabulary are unused, and the mask token includes the
    /// white space before it.
    Camembert,
    /// Quotation marks, accents and case are normalised, and the special tokens around a text are
    /// those of the post-processor in `tokenizer.json`, if it has one.
    Albert,
    /// White space is normalised, and the character map is not used.
    Deberta,
}

impl UnigramRules {
    /// The name of the model file of SentencePiece.
    pub(crate) const fn model_file(self) -> &'static str {
        match self {
            Self::XlmRoberta | Self::Camembert => "sentencepiece.bpe.model",
            Self::Albert => "spiece.model",
            Self::Deberta => "spm.model",
        }
    }
}

pub(crate) const BERT_TOKENS: &[(&str, &str)] = &[
    ("unk_token", "[UNK]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];

const ROBERTA_TOKENS: &[(&str, &str)] = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];

const ALBERT_TOKENS: &[(&str, &str)] = &[
    ("bos_token", "[CLS]"),
    ("eos_token", "[SEP]"),
    ("unk_token", "<unk>"),
    ("sep_token", "[SEP]"),
    ("pad_token", "<pad>"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];

const DEBERTA_TOKENS: &[(&str, &str)] = &[
    ("bos_token", "[CLS]"),
    ("eos_token", "[SEP]"),
    ("unk_token", "[UNK]"),
    ("sep_token", "[SEP]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];

const MPNET_TOKENS: &[(&str, &str)] = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "[UNK]"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];

static CLASSES: [TokenizerClass; 8] = [
    TokenizerClass {
        names: &[
            "BertTokenizer",
            "DPRContextEncoderTokenizer",
            "DPRQuestionEncoderTokenizer",
            "ElectraTokenizer",
            "LayoutLMTokenizer",
            "LxmertTokenizer",
            "MobileBertTokenizer",
            "SqueezeBertTokenizer",
        ],
        algorithm: Algorithm::WordPiece(SpecialTokenLayout::Bert),
        special_tokens: BERT_TOKENS,
        has_type_ids: true,
    },
    TokenizerClass {
        names: &["DPRReaderTokenizer", "DistilBertTokenizer"],
        algorithm: Algorithm::WordPiece(SpecialTokenLayout::Bert),
        special_tokens: BERT_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &["MPNetTokenizer"],
        algorithm: Algorithm::WordPiece(SpecialTokenLayout::Roberta),
        special_tokens: MPNET_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &[
            "BartTokenizer",
            "LEDTokenizer",
            "LongformerTokenizer",
            "MvpTokenizer",
            "RobertaTokenizer",
        ],
        algorithm: Algorithm::ByteBpe,
        special_tokens: ROBERTA_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &["XLMRobertaTokenizer"],
        algorithm: Algorithm::Unigram(UnigramRules::XlmRoberta),
        special_tokens: ROBERTA_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &["CamembertTokenizer"],
        algorithm: Algorithm::Unigram(UnigramRules::Camembert),
        special_tokens: ROBERTA_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &["AlbertTokenizer"],
        algorithm: Algorithm::Unigram(UnigramRules::Albert),
        special_tokens: ALBERT_TOKENS,
        has_type_ids: false,
    },
    TokenizerClass {
        names: &["DebertaV2Tokenizer"],
        algorithm: Algorithm::Unigram(UnigramRules::Deberta),
        special_tokens: DEBERTA_TOKENS,
        has_type_ids: true,
    },
];

impl TokenizerClass {
    /// The rules of a class; `name` has no suffix `Fast`. `None` for a class that is not known, or
    /// that follows all rules of `tokenizer.json`.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        CLASSES.iter().find(|class| class.names.contains(&name))
    }

    /// Whether the class is CamemBERT's.
    fn is_camembert(&self) -> bool {
        self.algorithm == Algorithm::Unigram(UnigramRules::Camembert)
    }

    /// The default of the special tokens without a name.
    pub(crate) fn extra_special_tokens(&self) -> &'static [&'static str] {
        if self.is_camembert() { &["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"] } else { &[] }
    }

    /// Whether a mask token without options includes the white space before it.
    pub(crate) fn mask_includes_space(&self) -> bool {
        self.is_camembert()
    }
}
