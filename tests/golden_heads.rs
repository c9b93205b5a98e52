//! Compares models with task heads, and their pipelines, with transformers. Each model has a
//! different activation function; the inputs are padded pairs of texts.

use std::path::PathBuf;

use candle_core::{DType, Device::Cpu, IndexOp, Tensor};
use encoder::{
    Aggregation, EncoderForMaskedLm, EncoderForNextSentencePrediction, EncoderForQuestionAnswering,
    EncoderForSequenceClassification, EncoderForTokenClassification, Inspection, LoadOptions,
    LoadReport, MaskFiller, MaskFillerParams, ModelFiles, Pipeline, QuestionAnswerer,
    TextClassifier, TokenClassifier,
};
use mha::AttentionMask;

use crate::support::{Golden, assert_close, golden, golden_copy};

type Result<T = ()> = anyhow::Result<T>;

/// A model folder in `tests/golden`, with its inputs and expected outputs.
struct Case {
    name: String,
    golden: Golden,
    mask: AttentionMask,
}

impl Case {
    fn open(name: &str) -> Result<Self> {
        let name = format!("heads/{name}");
        let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
        let mask = AttentionMask::none().with_padding(golden.get("mask"))?;
        Ok(Self { name, golden, mask })
    }

    fn load<M>(
        &self,
        from_dir: impl Fn(PathBuf, &LoadOptions) -> encoder::Result<(M, LoadReport)>,
    ) -> Result<M> {
        let (model, report) = from_dir(golden(&self.name), &LoadOptions::default())?;
        assert!(report.is_complete() && report.ignored.is_empty(), "{report:?}");
        Ok(model)
    }

    fn inputs(&self) -> (&Tensor, Option<&Tensor>, &AttentionMask) {
        let types = Some(self.golden.get("token_type_ids"));
        (self.golden.get("input_ids"), types, &self.mask)
    }

    /// Compares `got` with the expected output. If there is an output for each token, only visible
    /// tokens are compared. The values are at most 10 in magnitude.
    fn check(&self, key: &str, got: &Tensor) -> Result {
        let expected = self.golden.get(key);
        let (got, expected) = match got.rank() {
            2 if got.dims() != self.golden.get("mask").dims() => (got.clone(), expected.clone()),
            rank => {
                let mut visible = self.golden.get("mask").to_dtype(DType::F32)?; // (B, T)
                if rank == 3 {
                    visible = visible.unsqueeze(2)?;
                }
                (got.broadcast_mul(&visible)?, expected.broadcast_mul(&visible)?)
            }
        };
        assert_close(&format!("{} {key}", self.name), &got, &expected, 1e-5);
        Ok(())
    }
}

#[test]
fn heads_equal_transformers() -> Result {
    let case = Case::open("masked_lm")?;
    let (ids, types, mask) = case.inputs();
    case.check("logits", &case.load(EncoderForMaskedLm::from_dir)?.forward(ids, types, mask)?)?;

    let case = Case::open("next_sentence")?;
    let (ids, types, mask) = case.inputs();
    let model = case.load(EncoderForNextSentencePrediction::from_dir)?;
    case.check("logits", &model.forward(ids, types, mask)?)?;

    for (name, labels) in [("sequence", 3), ("score", 1)] {
        let case = Case::open(name)?;
        let (ids, types, mask) = case.inputs();
        let model = case.load(EncoderForSequenceClassification::from_dir)?;
        assert_eq!(model.labels().names().len(), labels);
        case.check("logits", &model.forward(ids, types, mask)?)?;
    }

    let case = Case::open("token")?;
    let (ids, types, mask) = case.inputs();
    let model = case.load(EncoderForTokenClassification::from_dir)?;
    assert_eq!(model.labels().names()[4], "LABEL_4");
    case.check("logits", &model.forward(ids, types, mask)?)?;

    let case = Case::open("answer")?;
    let (ids, types, mask) = case.inputs();
    let scores = case.load(EncoderForQuestionAnswering::from_dir)?.forward(ids, types, mask)?;
    case.check("start_logits", &scores.start)?;
    case.check("end_logits", &scores.end)
}

/// Each folder can run as `EncoderModel` and as the class that saved it.
#[test]
fn inspection_names_the_class_with_the_head() -> Result {
    for (name, class) in [
        ("masked_lm", "EncoderForMaskedLm"),
        ("next_sentence", "EncoderForNextSentencePrediction"),
        ("sequence", "EncoderForSequenceClassification"),
        ("score", "EncoderForSequenceClassification"),
        ("token", "EncoderForTokenClassification"),
        ("answer", "EncoderForQuestionAnswering"),
    ] {
        let found = Inspection::new(&ModelFiles::dir(golden(&format!("heads/{name}")))?);
        assert_eq!(found.runs_as, ["EncoderModel", class], "{name}: {:?}", found.problems);
        assert!(found.problems.is_empty(), "{name}: {:?}", found.problems);
    }
    Ok(())
}

#[test]
fn loading_a_missing_head_is_an_error() {
    let folder = golden("heads/answer");
    let error =
        EncoderForTokenClassification::from_dir(folder, &LoadOptions::default()).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("2 problems"), "{error}");
    assert!(error.contains("\"classifier.weight\" is missing"), "{error}");
    assert!(
        error.contains("expected shape [2, 24] (number of labels = 2, hidden_size = 24)"),
        "{error}"
    );
}

const TEXTS: [&str; 6] = ["a cab", "", "Café x", LONG, "yz", "fade"];
const LONG: &str = "dead beef dead beef dead beef dead beef dead beef dead beef dead beef dead beef \
                    dead beef ";

/// Probabilities of the text-classification pipeline. One of the texts, `LONG`, is truncated.
#[test]
fn class_probabilities_equal_transformers() -> Result {
    let expected = Golden::open("heads/texts.safetensors")?;
    let classifier = TextClassifier::from_dir(golden("heads/sequence"), &LoadOptions::default())?;
    let got = Tensor::new(classifier.classify(&TEXTS)?, &Cpu)?;
    assert_close("classify", &got, expected.get("classify"), 2e-6);
    let error = classifier.rerank("a", &["b"]).unwrap_err().to_string();
    assert_eq!(error, "number of labels 3 is invalid: expected 1, for reranking");
    Ok(())
}

/// The five most likely tokens of the fill-mask pipeline for each of two masks.
#[test]
fn tokens_for_masks_equal_transformers() -> Result {
    let expected = Golden::open("heads/texts.safetensors")?;
    let filler = MaskFiller::from_dir(golden("heads/masked_lm"), &LoadOptions::default())?;
    let masks = filler.fill("a [MASK] cab [MASK] bad", 5)?;
    let tokens = expected.get("fill.tokens").to_vec2::<i64>()?;
    let scores = expected.get("fill.scores").to_vec2::<f32>()?;
    assert_eq!(masks.len(), 2);
    for ((candidates, tokens), scores) in masks.iter().zip(tokens).zip(scores) {
        let got: Vec<i64> = candidates.iter().map(|candidate| candidate.token_id.into()).collect();
        assert_eq!(got, tokens);
        for (candidate, score) in candidates.iter().zip(scores) {
            assert!((candidate.score - score).abs() < 2e-6, "{candidate:?} {score}");
        }
    }
    assert_eq!(
        filler.fill("a cab", 5).unwrap_err().to_string(),
        "text \"a cab\" has no mask token: expected at least one, such as [MASK]"
    );
    Ok(())
}

#[test]
fn masks_in_the_second_text_of_a_pair_have_its_token_type() -> Result {
    let files = golden("heads/masked_lm");
    let filler = MaskFiller::from_dir(&files, &LoadOptions::default())?;
    let (model, _) = EncoderForMaskedLm::from_dir(&files, &LoadOptions::default())?;
    let tokens = filler.tokenizer().encode_pairs(&[("a cab", "bad [MASK] cab")])?.swap_remove(0);
    let ids = Tensor::new(&tokens.input_ids[..], &Cpu)?.unsqueeze(0)?;
    let types = Tensor::new(&tokens.token_type_ids[..], &Cpu)?.unsqueeze(0)?;
    let mask_id = filler.tokenizer().pieces("[MASK]", false)?[0].id;
    let mask = tokens.input_ids.iter().position(|id| *id == mask_id).expect("a mask token");
    let probability = |types: Option<&Tensor>, id: u32| -> Result<f32> {
        let logits = model.forward(&ids, types, &AttentionMask::none())?.i((0, mask))?;
        Ok(candle_nn::ops::softmax(&logits, 0)?.i(id as usize)?.to_scalar()?)
    };
    let best = &filler.compute(&[&tokens], &MaskFillerParams { top: 1 })?[0][0][0];
    assert!((best.score - probability(Some(&types), best.token_id)?).abs() < 1e-6, "{best:?}");
    assert!((best.score - probability(None, best.token_id)?).abs() > 1e-5, "{best:?}");
    let without_mask = filler.tokenizer().encode(&["a cab"])?;
    let filled = filler.compute(&[&without_mask[0]], &MaskFillerParams { top: 1 })?;
    assert_eq!(filled, [Vec::<Vec<_>>::new()]);
    Ok(())
}

#[test]
fn entities_equal_transformers_for_each_aggregation() -> Result {
    let expected = Golden::open("heads/texts.safetensors")?;
    let tagger = TokenClassifier::from_dir(golden("heads/tagger"), &LoadOptions::default())?;
    check_entities(&tagger, &expected)?;
    assert_eq!(tagger.classify("", Aggregation::Max)?, []);
    Ok(())
}

/// Compares the entities of each aggregation with those of the token-classification pipeline.
pub(crate) fn check_entities(tagger: &TokenClassifier, expected: &Golden) -> Result {
    const TEXT: &str = "Café bead, Abba (cab) ébb faced";
    for (name, aggregation, labels) in [
        ("none", Aggregation::None, &["O", "B-PER", "I-PER", "B-LOC", "I-LOC"][..]),
        ("simple", Aggregation::Simple, &["O", "PER", "LOC"]),
        ("first", Aggregation::First, &["O", "PER", "LOC"]),
        ("average", Aggregation::Average, &["O", "PER", "LOC"]),
        ("max", Aggregation::Max, &["O", "PER", "LOC"]),
    ] {
        let entities = tagger.classify(TEXT, aggregation)?;
        let rows: Vec<Vec<f64>> = entities
            .iter()
            .map(|entity| {
                let label = labels.iter().position(|label| *label == entity.label).unwrap();
                let range = &entity.span.range;
                vec![label as f64, range.start as f64, range.end as f64, entity.span.score.into()]
            })
            .collect();
        let name = format!("tag.{name}");
        assert_close(&name, &Tensor::new(rows, &Cpu)?, expected.get(&name), 1e-6);
    }
    Ok(())
}

/// `generate.py` computes the expected spans from transformers' logits: the score of a span is its
/// start probability × its end probability.
#[test]
fn answers_have_the_spans_and_scores_of_the_definition() -> Result {
    let expected = Golden::open("heads/texts.safetensors")?;
    let model = QuestionAnswerer::from_dir(golden("heads/answer"), &LoadOptions::default())?;
    let found = model.answer("bad?", "A café fed, a cab: bead", 5)?;
    let rows: Vec<Vec<f64>> = found
        .answers
        .iter()
        .map(|a| vec![a.range.start as f64, a.range.end as f64, a.score.into()])
        .collect();
    assert_close("answers", &Tensor::new(rows, &Cpu)?, expected.get("answer.spans"), 1e-7);
    let none = Tensor::new(found.no_answer, &Cpu)?;
    assert_close("no answer", &none, expected.get("answer.none"), 1e-7);
    assert_eq!(model.answer("bad?", "", 5)?.answers, []);
    let error = model.answer(&"a ".repeat(40), "b", 5).unwrap_err().to_string();
    assert!(error.ends_with(" has 40 tokens: expected at most 28; shorten it"), "{error}");
    Ok(())
}

/// The text is longer than the model's maximum length of 32 tokens. Entities and answers come from
/// all parts of the text, in order and without duplicates.
#[test]
fn entities_and_answers_cover_all_windows_of_a_long_text() -> Result {
    let tagger = TokenClassifier::from_dir(golden("heads/tagger"), &LoadOptions::default())?;
    let text = "bead abba ".repeat(20);
    let entities = tagger.classify(&text, Aggregation::None)?;
    let last = entities.last().unwrap().span.range.end;
    assert!(last > 190, "{entities:?}");
    let starts: Vec<usize> = entities.iter().map(|entity| entity.span.range.start).collect();
    assert!(starts.is_sorted_by(|a, b| a < b), "{starts:?}");
    let model = QuestionAnswerer::from_dir(golden("heads/answer"), &LoadOptions::default())?;
    let answers = model.answer("bad?", &text, usize::MAX)?.answers;
    let covered = |at: usize| answers.iter().any(|answer| answer.range.contains(&at));
    assert!([0, 50, 100, 198].into_iter().all(covered), "{answers:?}");
    Ok(())
}

/// Checkpoints of `torch.save` in the current format and in the format before PyTorch 1.6, with
/// tensors that are views of larger storages and have permuted strides.
#[test]
fn pickled_weights_equal_safetensors_weights() -> Result {
    let case = Case::open("sequence")?;
    let (ids, types, mask) = case.inputs();
    for file in ["archive.bin", "early.bin"] {
        let config = std::fs::read(golden("heads/sequence/config.json"))?;
        let weights = std::fs::read(golden(&format!("pickled/{file}")))?;
        let files = [("config.json", config), ("pytorch_model.bin", weights)];
        let files = ModelFiles::memory(file, files);
        let (model, report) =
            EncoderForSequenceClassification::from_files(&files, &LoadOptions::default())?;
        assert_eq!(report.ignored, ["bert.embeddings.position_ids"]);
        case.check("logits", &model.forward(ids, types, mask)?)?;
    }
    Ok(())
}

/// Scores of `CrossEncoder`. The second query is truncated; in its pair with `LONG`, both texts are
/// truncated.
#[test]
fn ranking_scores_equal_sentence_transformers() -> Result {
    let expected = Golden::open("heads/texts.safetensors")?;
    let classifier = TextClassifier::from_dir(golden("heads/score"), &LoadOptions::default())?;
    for query in ["bad cab", "dead beef dead beef dead beef dead beef"] {
        let name = format!("rerank.{query}");
        let text = if query.len() > 10 { format!("{query} ") } else { query.to_string() };
        let got = Tensor::new(classifier.rerank(&text, &TEXTS)?, &Cpu)?;
        assert_close(&name, &got, expected.get(&name), 1e-6);
    }
    // With the activation Identity, the scores are the logits.
    let files = ["model.safetensors", "vocab.txt", "tokenizer_config.json"];
    let dir = golden_copy("heads/score", &files)?;
    let config = std::fs::read_to_string(golden("heads/score/config.json"))?;
    for key in [
        r#""sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}"#,
        r#""sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity""#,
    ] {
        let config = config.replacen('{', &format!("{{ {key},"), 1);
        std::fs::write(dir.path().join("config.json"), config)?;
        let bare = TextClassifier::from_dir(dir.path(), &LoadOptions::default())?;
        let got = Tensor::new(bare.rerank("bad cab", &TEXTS)?, &Cpu)?;
        assert_close("logits", &got, expected.get("rerank_logits"), 1e-5);
    }
    Ok(())
}
