//! In f32, bf16 and int8, the embedding of a text has the same bits in every batch, order and
//! amount of padding, with every number of threads, and in every process. `MHA_ISA` selects the instruction set of
//! the run.

use std::{fs, sync::OnceLock};

use candle_core::{Device::Cpu, IndexOp, Tensor};
use encoder::{Embedder, LoadOptions, Precision};
use mha::AttentionMask;
use proptest::{prelude::*, sample};
use serde_json::{Map, Value, json};

use crate::{
    cli::{encodle, stdout},
    support::{MINILM, golden, golden_copy, max_difference},
};

/// The expected results: the texts, and for each precision an embedder and the embedding of each
/// text in a batch of its own.
struct Reference {
    texts: Vec<String>,
    precisions: Vec<(Precision, Embedder, Tensor)>,
}

fn reference() -> &'static Reference {
    static REFERENCE: OnceLock<Reference> = OnceLock::new();
    REFERENCE.get_or_init(|| {
        let texts = fs::read_to_string(golden("sentences.txt")).unwrap();
        let texts: Vec<String> = texts.lines().map(String::from).collect();
        let precisions = [Precision::F32, Precision::Bf16, Precision::Int8].map(|precision| {
            let embedder =
                Embedder::from_dir(MINILM, &LoadOptions::default().with_precision(precision))
                    .unwrap();
            let embeddings = texts.iter().map(|text| embedder.embed(&[text]).unwrap());
            let embeddings = Tensor::cat(&embeddings.collect::<Vec<_>>(), 0).unwrap();
            (precision, embedder, embeddings)
        });
        Reference { texts, precisions: precisions.into() }
    })
}

/// Number of random cases. The scalar kernels are a hundred times slower.
fn cases() -> u32 {
    if std::env::var("MHA_ISA").is_ok_and(|isa| isa == "scalar") { 1 } else { 12 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// Random texts with repetitions, random order, token budget and number of threads.
    #[test]
    fn the_embedding_of_a_text_does_not_depend_on_its_batch(
        chosen in prop::collection::vec(any::<sample::Index>(), 1..14),
        budget in 1..400usize,
        threads in 1..=3usize,
    ) {
        let Reference { texts, precisions } = reference();
        let chosen: Vec<u32> = chosen.iter().map(|i| i.index(texts.len()) as u32).collect();
        let batch: Vec<&String> = chosen.iter().map(|&i| &texts[i as usize]).collect();
        let chosen = Tensor::new(&chosen[..], &Cpu)?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        for (precision, embedder, expected) in precisions {
            let embedder = embedder.clone().with_token_budget(budget);
            let got = pool.install(|| embedder.embed(&batch))?;
            let difference = max_difference(&got, &expected.index_select(&chosen, 0)?)?;
            prop_assert_eq!(difference, 0.0, "{:?}", precision);
        }
    }

    /// A batch of two sequences with a random amount of padding.
    #[test]
    fn hidden_states_do_not_depend_on_padding(
        padding in 1..60usize,
        text in any::<sample::Index>(),
    ) {
        let Reference { texts, precisions } = reference();
        for (precision, embedder, _) in precisions {
            let (tokenizer, model) = (embedder.tokenizer(), embedder.encoder()?);
            let ids = |text: &str| Ok::<_, encoder::Error>(tokenizer.encode(&[text])?.remove(0).input_ids);
            let (ids, other) = (ids(&texts[text.index(texts.len())])?, ids("another sequence")?);
            let t = ids.len().max(other.len()) + padding;
            let mut padded = vec![ids.clone(), other.clone()];
            padded.iter_mut().for_each(|ids| ids.resize(t, 0));
            let lens = Tensor::new(&[ids.len() as u32, other.len() as u32], &Cpu)?;
            let mask = AttentionMask::none().with_valid_lens(&lens)?;
            let got = model.forward(&Tensor::new(padded, &Cpu)?, None, &mask)?;
            let got = got.last_hidden_state.i((0, ..ids.len()))?;
            let ids = Tensor::new(vec![ids], &Cpu)?;
            let expected = model.forward(&ids, None, &AttentionMask::none())?.last_hidden_state;
            prop_assert_eq!(max_difference(&got, &expected.i(0)?)?, 0.0, "{:?}", precision);
        }
    }
}

/// `WORD` and `Wörd` are equal after lowercasing and without accents. The tokens are added by the
/// rules of a class, by a whole `tokenizer.json`, and with lowercasing that
/// `sentence_bert_config.json` puts before a normalizer that keeps the case.
#[test]
fn added_tokens_that_are_equal_after_normalisation_give_the_same_bytes_in_every_process()
-> anyhow::Result<()> {
    let vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"];
    let added: Vec<_> = (6..)
        .zip(["WORD", "Wörd", "Tea", "TEA", "téa"])
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": true, "special": false})
        })
        .collect();
    let by_id: Map<String, Value> =
        added.iter().map(|token| (token["id"].to_string(), token.clone())).collect();
    let tokenizer_json = |normalizer: Value| {
        let vocab: Map<String, Value> =
            vocab.iter().zip(0..).map(|(token, id)| (token.to_string(), id.into())).collect();
        let model = json!({"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocab,
                           "continuing_subword_prefix": "##", "max_input_chars_per_word": 100});
        let json = json!({"version": "1.0", "model": model, "normalizer": normalizer,
                          "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": added});
        ("tokenizer.json", json.to_string())
    };
    let config = |json: Value| ("tokenizer_config.json", json.to_string());
    let whole = || config(json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
    let uncased = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                      "strip_accents": true, "lowercase": true});
    let accents = json!({"type": "Sequence", "normalizers": [{"type": "NFD"},
                         {"type": "StripAccents"}]});
    let modules = json!([
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    ]);
    let of_class = json!({"tokenizer_class": "BertTokenizer", "added_tokens_decoder": by_id});
    for files in [
        vec![config(of_class), ("vocab.txt", vocab.join("\n"))],
        vec![whole(), tokenizer_json(uncased)],
        vec![
            whole(),
            tokenizer_json(accents),
            ("sentence_bert_config.json", r#"{"do_lower_case": true}"#.to_string()),
        ],
    ] {
        let dir = golden_copy("bert_gelu", &["config.json", "model.safetensors"])?;
        fs::create_dir(dir.path().join("1_Pooling"))?;
        let pooling = ("1_Pooling/config.json", r#"{"pooling_mode": "mean"}"#.to_string());
        for (name, content) in
            files.iter().chain([&("modules.json", modules.to_string()), &pooling])
        {
            fs::write(dir.path().join(name), content)?;
        }
        let model = dir.path().to_str().expect("UTF-8");
        let embed =
            || stdout(encodle(&["embed", "--model", model, "a wörd", "tea", "TEA"], b"").success());
        let first = embed();
        assert_eq!(first.lines().count(), 3, "{first}");
        for _ in 1..20 {
            assert_eq!(embed(), first, "{files:?}");
        }
    }
    Ok(())
}
