"""Pipelines with a head, cross-encoders and attention weights against golden files."""

import copy
import json
import multiprocessing
import pickle
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import GOLDEN, assert_close, golden

import encodle
from encodle._arguments import BUILTIN_MODEL

HEADS = GOLDEN / "heads"
LONG = "dead beef " * 9
TEXTS = ["a cab", "", "Café x", LONG, "yz", "fade"]


@pytest.fixture(scope="module")
def expected():
    return golden("heads/texts.safetensors")


def test_class_probabilities_equal_transformers(expected):
    classifier = encodle.TextClassifier(HEADS / "sequence")
    results = classifier.classify(TEXTS)
    assert classifier.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert_close([list(r["scores"].values()) for r in results], expected["classify"], 2e-6)
    best = expected["classify"].argmax(axis=1)
    assert [r["label"] for r in results] == [f"LABEL_{i}" for i in best]
    assert classifier.classify("a cab") == results[0]


def test_entities_equal_transformers(expected):
    tagger = encodle.TokenClassifier(HEADS / "tagger")
    text = "Café bead, Abba (cab) ébb faced"
    labels = ["O", "PER", "LOC"]
    for aggregation in ("none", "simple", "first", "average", "max"):
        names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"] if aggregation == "none" else labels
        rows = []
        for entity in tagger.tag(text, aggregation):
            assert entity["text"] == text[entity["start"] : entity["end"]]
            start, end = (len(text[: entity[key]].encode()) for key in ("start", "end"))
            rows.append([names.index(entity["label"]), start, end, entity["score"]])
        assert_close(rows, expected[f"tag.{aggregation}"], 1e-6)
    assert tagger.tag([text, ""])[1] == []
    with pytest.raises(ValueError, match='aggregation "all" is unknown'):
        tagger.tag(text, "all")


def test_answers_have_the_expected_spans(expected):
    answerer = encodle.QuestionAnswerer(HEADS / "answer")
    text = "A café fed, a cab: bead"
    found = answerer.answer("bad?", text, top_k=5)
    rows = []
    for answer in found["answers"]:
        assert answer["text"] == text[answer["start"] : answer["end"]]
        start, end = (len(text[: answer[key]].encode()) for key in ("start", "end"))
        rows.append([start, end, answer["score"]])
    assert_close(rows, expected["answer.spans"], 1e-7)
    assert_close(found["no_answer"], expected["answer.none"], 1e-7)
    assert answerer.answer("bad?", [text]) == [{**found, "answers": found["answers"][:1]}]
    with pytest.raises(encodle.EncodleError, match="has 40 tokens: expected at most 28"):
        answerer.answer("a " * 40, "b")


def test_tokens_for_masks_equal_transformers(expected):
    filler = encodle.MaskFiller(HEADS / "masked_lm")
    masks = filler.fill_mask("a [MASK] cab [MASK] bad")
    ids = [[token["token_id"] for token in mask] for mask in masks]
    assert ids == expected["fill.tokens"].tolist()
    scores = [[token["score"] for token in mask] for mask in masks]
    assert_close(scores, expected["fill.scores"], 2e-6)
    assert filler.fill_mask(["a [MASK]"], top_k=2)[0][0][0].keys() == {"token_id", "token", "score"}
    with pytest.raises(encodle.EncodleError, match="has no mask token"):
        filler.fill_mask("a cab")


def test_ranking_scores_equal_sentence_transformers(expected, tmp_path):
    ranker = encodle.CrossEncoder(HEADS / "score")
    scores = ranker.predict([("bad cab", text) for text in TEXTS])
    assert_close(scores, expected["rerank.bad cab"], 1e-6)
    assert ranker.predict(("bad cab", "a cab")) == scores[0]
    assert ranker.predict(inputs=("bad cab", "a cab")) == scores[0]
    assert ranker.predict(sentences=("bad cab", "a cab")) == scores[0]
    assert pickle.loads(pickle.dumps(ranker)).predict(("bad cab", "a cab")) == scores[0]
    ranked = ranker.rank("bad cab", TEXTS, top_k=3, return_documents=True)
    order = np.argsort(-scores)[:3]
    assert [(r["corpus_id"], r["text"]) for r in ranked] == [(i, TEXTS[i]) for i in order]
    logits = ranker.predict([("bad cab", text) for text in TEXTS], activation_fn=lambda x: x)
    assert_close(logits, expected["rerank_logits"], 1e-5)

    # An activation in config.json replaces the sigmoid; the identity gives the logits.
    for name in ("model.safetensors", "vocab.txt", "tokenizer_config.json"):
        shutil.copy(HEADS / "score" / name, tmp_path)
    config = json.loads((HEADS / "score/config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    bare = encodle.CrossEncoder(tmp_path)
    assert_close(bare.predict([("bad cab", text) for text in TEXTS]), logits, 0)


def test_predict_returns_logits_by_default_if_there_are_several_labels():
    encoder = encodle.CrossEncoder(HEADS / "sequence")
    pairs = [("a cab", "bad"), ("a", "b")]
    logits = encoder.predict(pairs)
    assert (encoder.num_labels, logits.shape) == (3, (2, 3))
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert_close(encoder.predict(pairs, apply_softmax=True), softmax, 1e-6)
    assert encoder.predict([]).shape == (0, 3)
    with pytest.raises(ValueError, match="the model has 3 labels: expected 1"):
        encoder.rank("a", ["b"])


def test_an_activation_returns_one_score_per_logit():
    one, three = encodle.CrossEncoder(HEADS / "score"), encodle.CrossEncoder(HEADS / "sequence")
    pairs = [("a cab", "bad"), ("a", "b")]
    logits = one.predict(pairs, activation_fn=lambda x: x)
    assert_close(one.predict(pairs, activation_fn=lambda x: x[:, 0]), logits, 0)
    with pytest.raises(ValueError, match=r"scores of shape \(2,\): expected \(2, 3\)"):
        three.predict(pairs, activation_fn=lambda x: x[:, 0], apply_softmax=True)


def test_the_attribute_activation_fn_is_the_default_of_predict():
    ranker = encodle.CrossEncoder(HEADS / "score")
    pairs = [("a cab", "bad"), ("a", "b")]
    scores, logits = ranker.predict(pairs), ranker.predict(pairs, activation_fn=np.array)
    assert ranker.activation_fn is None
    ranker.activation_fn = np.array
    assert_close(ranker.predict(pairs), logits, 0)
    assert ranker.rank("a cab", ["bad"])[0]["score"] == logits[0]
    assert_close(ranker.predict(pairs, activation_fn=np.exp), np.exp(logits), 0)
    assert_close(pickle.loads(pickle.dumps(ranker)).predict(pairs), logits, 0)
    ranker.activation_fn = None
    assert_close(ranker.predict(pairs), scores, 0)
    with pytest.raises(TypeError, match="activation_fn is 'relu': expected a function"):
        ranker.activation_fn = "relu"


def test_other_attributes_of_a_cross_encoder_cannot_be_set():
    ranker = encodle.CrossEncoder(HEADS / "score")
    for name in ("num_labels", "tokenizer"):
        with pytest.raises(AttributeError, match=name):
            setattr(ranker, name, 5)


def test_scores_of_a_torch_activation_are_float32():
    torch = pytest.importorskip("torch")
    ranker = encodle.CrossEncoder(HEADS / "score")
    pairs = [("a cab", "bad"), ("a", "b")]
    logits = ranker.predict(pairs, activation_fn=torch.nn.Identity())
    for dtype, tolerance in [(torch.float64, 0), (torch.bfloat16, 0.05)]:

        class Cast(torch.nn.Module):
            def forward(self, x, dtype=dtype):
                return x.to(dtype)

        scores = ranker.predict(pairs, activation_fn=Cast())
        assert scores.dtype == np.float32
        assert_close(scores, logits, tolerance)


def test_errors_of_pairs():
    encoder = encodle.CrossEncoder(HEADS / "score")
    frame = pd.DataFrame({"a": ["b"], "c": ["d"]})
    with pytest.raises(TypeError, match="inputs is a pandas DataFrame"):
        encoder.predict(frame)
    with pytest.raises(TypeError, match="documents is a pandas DataFrame"):
        encoder.rank("a", frame)
    for documents in ("some text", b"some text", {"text": 1}, {"text"}):
        with pytest.raises(TypeError, match="documents is .*: expected a list of texts"):
            encoder.rank("a", documents)
    assert encoder.rank("a", ["b"], top_k=0) == []
    with pytest.raises(ValueError, match="top_k is -1"):
        encoder.rank("a", ["b"], top_k=-1)
    with pytest.raises(TypeError, match="expected a pair of texts, or a list of pairs"):
        encoder.predict({"a", "b"})
    with pytest.raises(TypeError, match="pair 1 is 'b': expected two texts"):
        encoder.predict([("a", "b"), "b"])
    with pytest.raises(TypeError, match="expected a pair of texts, or a list of pairs"):
        encoder.predict("ab")
    with pytest.raises(TypeError, match="pair 0 is {'a': 'b', 'c': 'd'}: expected two texts"):
        encoder.predict([{"a": "b", "c": "d"}])
    with pytest.raises(TypeError, match="pair 0 contains None: expected two str"):
        encoder.predict([("a", None)])
    with pytest.raises(ValueError, match="prompt_name 'x' is unknown"):
        encoder.predict([("a", "b")], prompt_name="x")


def test_attention_weights_equal_transformers(sentences):
    expected = golden("sentences.safetensors")
    attention = encodle.AttentionReader().attentions(sentences[0])[0]
    assert (attention.kind, attention.truncated) == ("encoder", 0)
    assert attention.queries == attention.keys and attention.queries[0] == "[CLS]"
    assert_close(attention.weights[0], expected["layer_0_attention.0"][0], 1e-6)
    assert_close(attention.weights.sum(axis=-1), np.ones(attention.weights.shape[:3]), 1e-5)
    pair = encodle.AttentionReader().attentions("a", "b")[0]
    assert pair.queries == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]


def test_a_lone_surrogate_is_an_error_that_names_the_argument():
    reader, answerer = encodle.AttentionReader(), encodle.QuestionAnswerer(HEADS / "answer")
    for call, name in [
        (lambda: reader.attentions("\ud800"), "text"),
        (lambda: reader.attentions("a", "\ud800"), "second"),
        (lambda: answerer.answer("\ud800", "a cab"), "question"),
    ]:
        with pytest.raises(encodle.EncodleError, match=f"^{name} has a lone surrogate: expected"):
            call()


def test_the_picture_shows_the_chosen_head():
    attention = encodle.AttentionReader().attentions("I love AI")[0]
    svg = attention.svg(layer=1, head=8)
    assert svg.startswith("<svg") and "layer 1, head 8</text>" in svg
    assert f"i → love: {attention.weights[1, 8, 1, 2]:.4f}" in svg
    assert attention.html().startswith("<!doctype html>") and "mean of 12 heads" in attention.html()
    assert attention._repr_html_() == attention.svg()
    with pytest.raises(encodle.EncodleError, match="layer 6 does not exist: expected 0 to 5"):
        attention.svg(layer=6)
    with pytest.raises(ValueError, match='head "last" is unknown: expected the number of a head'):
        attention.svg(head="last")
    with pytest.raises(ValueError, match="layer is -1"):
        attention.svg(layer=-1)


#: A class, its model, and a method with its arguments.
METHODS = [
    (encodle.CrossEncoder, HEADS / "score", "predict", [("bad cab", "a cab")]),
    (encodle.TextClassifier, HEADS / "sequence", "classify", ["a bad cab"]),
    (encodle.TokenClassifier, HEADS / "tagger", "tag", ["Abba (cab)"]),
    (encodle.QuestionAnswerer, HEADS / "answer", "answer", ["bad?", "a cab fed"]),
    (encodle.MaskFiller, HEADS / "masked_lm", "fill_mask", ["a [MASK] cab"]),
    (encodle.AttentionReader, None, "attentions", ["I love AI"]),
    (encodle.SentenceTransformer, None, "encode", ["I love AI"]),
]


@pytest.mark.parametrize(("kind", "path", "name", "arguments"), METHODS)
def test_a_pickled_or_copied_model_gives_equal_results(kind, path, name, arguments):
    model = kind(path, precision="bf16", threads=1)

    def result(model):
        return _as_lists(getattr(model, name)(*arguments))

    expected = result(model)
    assert result(kind(path)) != expected  # the precision is a part of the state
    for copied in (pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model)):
        assert type(copied) is kind and copied is not model
        assert result(copied) == expected
    data = pickle.dumps(model)
    assert str(BUILTIN_MODEL).encode() not in data, "the folder differs between machines"


def test_copies_share_the_weights_and_have_settings_of_their_own():
    model = encodle.SentenceTransformer(prompts={"query": "Q: "})
    shallow, deep = copy.copy(model), copy.deepcopy(model)
    assert shallow._native is model._native and deep._native is model._native
    deep.prompts["query"], deep.max_seq_length = "R: ", 7
    assert (model.prompts["query"], model.max_seq_length) == ("Q: ", 256)


def test_models_are_sent_to_spawned_processes():
    models = [(kind(path), name, arguments) for kind, path, name, arguments in METHODS]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for model, name, arguments in models:
            method = getattr(model, name)
            assert _as_lists(pool.apply(method, arguments)) == _as_lists(method(*arguments))


def _as_lists(result):
    """The result with lists instead of arrays, for comparison by `==`."""
    if isinstance(result, (np.ndarray, np.generic)):
        return result.tolist()
    if isinstance(result, list):
        return [_as_lists(element) for element in result]
    return (result.queries, result.weights.tolist()) if hasattr(result, "weights") else result


@pytest.mark.parametrize(("kind", "path"), [method[:2] for method in METHODS])
def test_trust_remote_code_is_accepted(kind, path):
    for value in (True, False):
        assert kind(path, trust_remote_code=value)
