"""The routes of text-embeddings-inference, and their errors."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import (
    ENCODLE, MINILM, MODELS, ROOT, assert_error, assert_same_bits, assert_same_json, encodle,
    encodle_embed, describe, f32, wait_until,
)

TEXTS = ["A man is eating food.", "A man eats.", "Größe, naïveté, 東京 and 😀"]
LETTERS = ["a bad cab", "a bead", "fed a bad deaf cab", "x"]
# More than the 256 tokens of all-MiniLM-L6-v2 and the 32 of the tiny models.
LONG = "one two three four five " * 100
LONG_LETTERS = "a b c d e " * 20
MAX_TOKENS = 256


class TestEmbed:
    def test_texts_of_every_script(self, server):
        texts = json.loads((ROOT / "tests/golden/nasty_texts.json").read_text())
        assert_same_bits(server.json("/embed", {"inputs": texts}), encodle_embed(texts))

    def test_long_texts_are_truncated_unless_truncate_is_false(self, server):
        expected = encodle_embed([LONG, TEXTS[0]])
        body = {"inputs": [LONG, TEXTS[0]]}
        assert_same_bits(server.json("/embed", body), expected)
        assert_same_bits(server.json("/embed", body | {"truncate": True}), expected)
        right = server.json("/embed", body | {"truncation_direction": "right"})
        assert_same_bits(right, expected)
        assert_error(server.post("/embed", body | {"truncate": False}), 413)

    def test_truncation_direction_left_keeps_the_last_tokens(self, server):
        tokens = server.json("/tokenize", {"inputs": LONG})[0]
        first, *content, last = [token["id"] for token in tokens]
        ids = [first, *content[-(MAX_TOKENS - 2) :], last]
        body = {"inputs": LONG, "truncation_direction": "left"}
        assert_same_bits(server.json("/embed", body), server.json("/embed", {"inputs": ids}))

    def test_auto_truncate_truncates_the_texts_of_openai(self, server, serve):
        body = {"model": MINILM, "input": [TEXTS[0], LONG]}
        refused = server.post("/v1/embeddings", body)
        assert_error(refused, 400, "openai")
        assert "text 1 has at least 428 tokens: expected at most 256" in refused.json()["error"]["message"]
        server = serve("--auto-truncate")
        response = server.json("/v1/embeddings", body)
        assert_same_bits([data["embedding"] for data in response["data"]], encodle_embed(body["input"]))
        assert response["usage"]["prompt_tokens"] == 8 + MAX_TOKENS
        assert_error(server.post("/embed", {"inputs": LONG, "truncate": False}), 413)

    def test_encoding_format_is_float(self, server):
        body = {"inputs": TEXTS, "encoding_format": "float"}
        assert_same_bits(server.json("/embed", body), encodle_embed(TEXTS))
        response = server.post("/embed", body | {"encoding_format": "base64"})
        assert_error(response, 422)
        assert response.json()["error"].startswith("encoding_format is unknown: expected `float`")

    def test_normalize_false_gives_vectors_that_are_not_normalised(self, server):
        vectors = f32(server.json("/embed", {"inputs": TEXTS, "normalize": False}))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        assert (np.abs(lengths - 1) > 0.01).all(), f"lengths are {lengths.ravel()}"
        expected = encodle_embed(TEXTS)
        assert np.abs(vectors / lengths - expected).max() < 1e-6
        assert_same_bits(server.json("/embed", {"inputs": TEXTS, "normalize": True}), expected)

    def test_a_model_without_normalisation_is_normalised_unless_normalize_is_false(self, serve):
        folder = MODELS["sequence"]
        server = serve("--model", f"plain={folder}", "--pooling", "plain=mean")
        options = ["--model", folder, "--pooling", "mean"]
        plain = encodle_embed(LETTERS, *options)
        assert_same_bits(
            server.json("/embed", {"inputs": LETTERS}), encodle_embed(LETTERS, *options, "--normalize")
        )
        assert_same_bits(server.json("/embed", {"inputs": LETTERS, "normalize": False}), plain)
        response = server.json("/v1/embeddings", {"input": LETTERS, "model": "plain"})
        assert_same_bits([data["embedding"] for data in response["data"]], plain)

    def test_dimensions_of_a_model_that_truncates_are_normalised(self, serve, tmp_path):
        folder = shutil.copytree(ROOT / "weights/all-MiniLM-L6-v2", tmp_path / "model")
        (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 64}')
        server = serve("--model", f"short={folder}")
        for dimensions in (63, 64, 384):
            expected = encodle_embed(TEXTS, "--model", folder, "--dimensions", str(dimensions))
            response = server.json(
                "/v1/embeddings", {"model": "short", "input": TEXTS, "dimensions": dimensions}
            )
            assert_same_bits([data["embedding"] for data in response["data"]], expected)
        response = server.json("/v1/embeddings", {"model": "short", "input": TEXTS})
        expected = encodle_embed(TEXTS, "--model", folder)
        assert_same_bits([data["embedding"] for data in response["data"]], expected)

    def test_errors_of_token_ids_name_the_text(self, server):
        start, end = 101, 102
        for ids, status, message in [
            ([start, *[1045] * 300, end], 413, "text 1 has 302 tokens: expected at most 256; token ids"),
            ([start, 99_999, end], 422, "text 1: input_ids holds 99999: expected 0 or more, and below"),
        ]:
            response = server.post("/embed", {"inputs": [[start, end], ids], "truncate": True})
            assert_error(response, status)
            assert response.json()["error"].startswith(message)

    @pytest.mark.parametrize("prompt", ["query", "document"])
    def test_prompt_name_puts_the_prompt_before_the_text(self, models, prompt):
        found = models.json("/embed", {"inputs": LETTERS, "prompt_name": prompt, "model": "sentences"})
        options = ["--model", MODELS["sentences"], "--prompt-name", prompt]
        assert_same_bits(found, encodle_embed(LETTERS, *options))

    def test_the_default_is_the_first_embedding_model(self, serve):
        server = serve(*(f"--model={name}={MODELS[name]}" for name in ("tagger", "sentences")))
        expected = encodle_embed(LETTERS, "--model", MODELS["sentences"])
        assert_same_bits(server.json("/embed", {"inputs": LETTERS}), expected)


class TestEmbedAll:
    def test_hidden_states_of_every_token(self, server):
        found = server.json("/embed_all", {"inputs": TEXTS})
        tokens = server.json("/tokenize", {"inputs": TEXTS})
        assert [np.shape(states) for states in found] == [(len(t), 384) for t in tokens]

    def test_the_normalised_mean_of_the_hidden_states_is_the_embedding(self, server):
        [states] = server.json("/embed_all", {"inputs": TEXTS[0]})
        mean = np.mean(states, axis=0)
        # `encodle embed` computes the mean in f32, this test in f64.
        assert np.abs(mean / np.linalg.norm(mean) - encodle_embed(TEXTS[:1])[0]).max() < 1e-6

    def test_long_texts_are_truncated_unless_truncate_is_false(self, server):
        [states] = server.json("/embed_all", {"inputs": LONG})
        assert np.shape(states) == (MAX_TOKENS, 384)
        assert_error(server.post("/embed_all", {"inputs": LONG, "truncate": False}), 413)


class TestPredict:
    def expected(self, text, name="sequence"):
        [row] = encodle("classify", "--model", MODELS[name], text)
        scores = [{"score": score, "label": label} for label, score in row["scores"].items()]
        return sorted(scores, key=lambda element: -element["score"])

    def test_scores_of_the_command_in_descending_order(self, models):
        found = models.json("/predict", {"inputs": LETTERS[0]})
        assert_same_json(found, self.expected(LETTERS[0]))

    def test_a_list_of_lists_gives_one_list_per_element(self, models):
        found = models.json("/predict", {"inputs": [[text] for text in LETTERS]})
        assert_same_json(found, [self.expected(text) for text in LETTERS])

    def test_two_strings_are_a_pair(self, models):
        [row] = encodle("rerank", "--model", MODELS["ranker"], "--query", "bad", "a cab")
        body = {"inputs": ["bad", "a cab"], "model": "ranker"}
        assert_same_json(models.json("/predict", body), [{"score": row["score"], "label": "LABEL_0"}])
        pair = models.json("/predict", {"inputs": ["a bad cab", "a bead"]})
        assert pair != self.expected("a bad cab")
        both = models.json("/predict", {"inputs": [["a bad cab", "a bead"], ["x"]]})
        assert_same_json(both, [pair, self.expected("x")])

    def test_raw_scores_are_logits(self, models):
        found = models.json("/predict", {"inputs": LETTERS[0], "raw_scores": True})
        logits = np.array([element["score"] for element in found])
        softmax = np.exp(logits - logits.max())
        softmax /= softmax.sum()
        expected = self.expected(LETTERS[0])
        assert [e["label"] for e in found] == [e["label"] for e in expected]
        assert np.abs(softmax - [e["score"] for e in expected]).max() < 1e-6

    def test_the_root_is_predict_for_a_classifier(self, serve):
        server = serve("--model", MODELS["sequence"])
        assert_same_json(server.json("/", {"inputs": LETTERS[0]}), self.expected(LETTERS[0]))

    def test_top_k_keeps_the_labels_with_the_highest_scores(self, models):
        expected = self.expected(LETTERS[0])
        for k in (1, 2, 3, 100):
            body = {"inputs": LETTERS[0], "parameters": {"top_k": k}}
            assert_same_json(models.json("/predict", body), expected[:k])
        body = {"inputs": LETTERS[0], "parameters": {"top_k": 0}}
        assert_error(models.post("/predict", body), 400)

    def test_function_to_apply_replaces_the_function_of_the_model(self, models):
        body = {"inputs": [[text] for text in LETTERS]}
        scores = lambda function, **fields: models.json(
            "/predict", body | {"parameters": {"function_to_apply": function}} | fields
        )
        raw = models.json("/predict", body | {"raw_scores": True})
        assert_same_json(scores("none"), raw)
        assert_same_json(scores("none", raw_scores=True), raw)
        assert_same_json(scores("softmax"), models.json("/predict", body))  # the model's function
        for found, logits in zip(scores("sigmoid"), raw, strict=True):
            assert [element["label"] for element in found] == [e["label"] for e in logits]
            expected = [1 / (1 + np.exp(-element["score"])) for element in logits]
            # This test computes in f64.
            assert np.abs(np.array([e["score"] for e in found]) - expected).max() < 1e-6
        contradiction = {"raw_scores": True, "parameters": {"function_to_apply": "softmax"}}
        assert_error(models.post("/predict", body | contradiction), 400)

    def test_long_texts_are_truncated_unless_truncate_is_false(self, models):
        found = models.json("/predict", {"inputs": LONG_LETTERS})
        assert_same_json(found, self.expected(LONG_LETTERS))
        assert_error(models.post("/predict", {"inputs": LONG_LETTERS, "truncate": False}), 413)
        right = {"inputs": "a " * 20 + "b " * 20}
        left = right | {"truncation_direction": "left"}
        assert models.json("/predict", left) != models.json("/predict", right)


class TestRerank:
    def expected(self, texts, query="bad"):
        return encodle("rerank", "--model", MODELS["ranker"], "--query", query, *texts)

    def test_scores_of_the_command_in_descending_order(self, models):
        found = models.json("/rerank", {"query": "bad", "texts": LETTERS})
        rows = self.expected(LETTERS)
        assert [element["index"] for element in found] == [row["document"] - 1 for row in rows]
        assert_same_bits([e["score"] for e in found], [row["score"] for row in rows], "scores")
        assert all(element.get("text") is None for element in found)

    def test_return_text_adds_the_texts(self, models):
        found = models.json("/rerank", {"query": "bad", "texts": LETTERS, "return_text": True})
        assert [element["text"] for element in found] == [LETTERS[e["index"]] for e in found]

    def test_raw_scores_are_logits(self, models):
        found = models.json("/rerank", {"query": "bad", "texts": LETTERS, "raw_scores": True})
        rows = self.expected(LETTERS)
        assert [element["index"] for element in found] == [row["document"] - 1 for row in rows]
        logits = np.array([element["score"] for element in found])
        assert np.abs(1 / (1 + np.exp(-logits)) - [row["score"] for row in rows]).max() < 1e-6

    def test_top_n_keeps_the_best_results(self, models):
        body = {"query": "bad", "texts": LETTERS}
        expected = models.json("/rerank", body)
        for n in (1, 2, 4, 100):
            assert_same_json(models.json("/rerank", body | {"top_n": n}), expected[:n])
        assert_error(models.post("/rerank", body | {"top_n": 0}), 400)

    def test_long_texts_are_truncated_unless_truncate_is_false(self, models):
        body = {"query": "bad", "texts": [LONG_LETTERS, "x"]}
        assert_error(models.post("/rerank", body | {"truncate": False}), 413)
        found = models.json("/rerank", body)
        rows = self.expected([LONG_LETTERS, "x"])
        assert [(e["index"], f32(e["score"])) for e in found] == [
            (row["document"] - 1, f32(row["score"])) for row in rows
        ]
        right = {"query": "bad", "texts": ["a " * 20 + "b " * 20]}
        left = right | {"truncation_direction": "left"}
        assert models.json("/rerank", left) != models.json("/rerank", right)


class TestSimilarity:
    def test_cosines_are_those_of_the_vectors(self, server):
        body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
        found = server.json("/similarity", body)
        vectors = encodle_embed(TEXTS).astype(np.float64)
        assert np.abs(np.array(found) - vectors @ vectors[0]).max() < 1e-6
        command = [ENCODLE, "similarity", TEXTS[0], TEXTS[1]]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert abs(found[1] - float(printed.stdout)) < 1e-6

    def test_parameters_are_applied(self, models):
        inputs = {"source_sentence": "a bad cab", "sentences": LETTERS}
        parameters = {"prompt_name": "query", "truncate": True, "truncation_direction": "right"}
        body = {"inputs": inputs, "parameters": parameters, "model": "sentences"}
        found = models.json("/similarity", body)
        options = ["--model", MODELS["sentences"], "--prompt-name", "query"]
        vectors = encodle_embed(["a bad cab", *LETTERS], *options).astype(np.float64)
        assert np.abs(np.array(found) - vectors[1:] @ vectors[0]).max() < 1e-6

    def test_long_texts_are_truncated_unless_truncate_is_false(self, server):
        inputs = {"source_sentence": TEXTS[0], "sentences": [LONG]}
        assert len(server.json("/similarity", {"inputs": inputs})) == 1
        body = {"inputs": inputs, "parameters": {"truncate": False}}
        assert_error(server.post("/similarity", body), 413)


class TestTokens:
    def test_tokens_have_positions_in_characters(self, server):
        text = "Größe 東京 😀 unaffable"
        [tokens] = server.json("/tokenize", {"inputs": text})
        assert [(t["special"], t["start"], t["stop"]) for t in (tokens[0], tokens[-1])] == [
            (True, None, None)
        ] * 2
        content = tokens[1:-1]
        assert not any(token["special"] for token in content)
        pieces = [text[token["start"] : token["stop"]] for token in content]
        assert "".join(pieces) == text.replace(" ", "")
        assert all(set(t) == {"id", "text", "special", "start", "stop"} for t in tokens)

    def test_add_special_tokens_false(self, server):
        [tokens] = server.json("/tokenize", {"inputs": TEXTS[0], "add_special_tokens": False})
        [all_tokens] = server.json("/tokenize", {"inputs": TEXTS[0]})
        assert_same_json(tokens, all_tokens[1:-1])

    def test_a_list_gives_one_list_per_text(self, server):
        found = server.json("/tokenize", {"inputs": TEXTS})
        assert_same_json(found, [server.json("/tokenize", {"inputs": t})[0] for t in TEXTS])

    def test_prompt_name_adds_the_tokens_of_the_prompt(self, models):
        body = {"inputs": "a bad cab", "model": "sentences"}
        [plain] = models.json("/tokenize", body)
        [prompted] = models.json("/tokenize", body | {"prompt_name": "query"})
        assert len(prompted) > len(plain)

    def test_the_predefined_prompts_of_an_embedding_model_are_empty(self, server):
        body = {"inputs": "a bad cab"}
        for prompt in ("query", "document"):
            found = server.json("/tokenize", body | {"prompt_name": prompt})
            assert_same_json(found, server.json("/tokenize", body))

    def test_long_texts_are_not_truncated(self, server):
        [tokens] = server.json("/tokenize", {"inputs": LONG})
        assert len(tokens) == 502

    def test_decode_reverses_tokenize(self, server):
        tokens = server.json("/tokenize", {"inputs": ["a man is eating food", "a dog"]})
        ids = [[token["id"] for token in text] for text in tokens]
        assert server.json("/decode", {"ids": ids}) == ["a man is eating food", "a dog"]
        assert server.json("/decode", {"ids": ids[1]}) == ["a dog"]
        body = {"ids": ids[1], "skip_special_tokens": False}
        assert server.json("/decode", body) == ["[CLS] a dog [SEP]"]
        half = [1037] * (1 << 19)
        assert_error(server.post("/decode", {"ids": [half, half, [1037]]}), 413)
        assert_error(server.post("/decode", {"ids": "a dog"}), 422)
        assert_error(server.post("/decode", {"ids": [[1037], ["a dog"]]}), 422)

    def test_every_model_tokenizes_and_decodes(self, models):
        for name in MODELS:
            [tokens] = models.json("/tokenize", {"inputs": "a b", "model": name})
            ids = [token["id"] for token in tokens]
            assert models.json("/decode", {"ids": ids, "model": name}) == ["a b"], name


class TestInfo:
    def test_info_has_the_fields_of_tei(self, server):
        response = server.get("/info")
        assert response.status_code == 200
        info = response.json()
        assert info["model_id"]
        assert "embedding" in info["model_type"]
        assert info["max_input_length"] == MAX_TOKENS
        assert info["max_client_batch_size"] == 2048
        assert info["max_batch_tokens"] == 512
        assert info["max_concurrent_requests"] == 512
        assert info["auto_truncate"] is True
        assert info["version"]

    def test_info_lists_all_models(self, models):
        text = json.dumps(models.get("/info").json()["models"])
        assert all(f'"{name}"' in text for name in MODELS), text


# Path, body, status, interface. The fixture `models` has a model for every task.
ERRORS = [
    # A field is missing or unknown, or its value has the wrong type.
    ("/embed", {}, 422, "tei"),
    ("/embed", {"inputs": None}, 422, "tei"),
    ("/embed", {"inputs": [1.5]}, 422, "tei"),
    ("/embed", {"inputs": ["a", 5]}, 422, "tei"),
    ("/embed", {"inputs": ["a", ["b"]]}, 422, "tei"),
    ("/embed", {"inputs": "a", "truncate": "yes"}, 422, "tei"),
    ("/embed", {"inputs": "a", "normalize": 1}, 422, "tei"),
    ("/embed", {"inputs": "a", "dimensions": "16"}, 422, "tei"),
    ("/embed", {"inputs": "a", "model": 1}, 422, "tei"),
    ("/", {"inputs": "a", "model": 1}, 422, "tei"),
    ("/embed", ["a"], 422, "tei"),
    ("/embed", [MINILM, "a"], 422, "tei"),
    ("/embed", "a", 422, "tei"),
    ("/predict", {"inputs": {"a": "b"}}, 422, "tei"),
    ("/rerank", {"query": "a"}, 422, "tei"),
    ("/rerank", {"query": ["a"], "texts": ["b"]}, 422, "tei"),
    ("/similarity", {"inputs": ["a", "b"]}, 422, "tei"),
    ("/similarity", {"inputs": ["a", ["b"]]}, 422, "tei"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": [True]},
     422, "tei"),
    ("/predict", {"inputs": "a", "parameters": ["a"]}, 422, "tei"),
    ("/predict", {"inputs": "a", "parameters": {"top_k": "2"}}, 422, "tei"),
    ("/predict", {"inputs": "a", "parameters": {"function_to_apply": "relu"}}, 422, "tei"),
    ("/predict", {"inputs": "a", "parameters": {"max_length": 20}}, 422, "tei"),
    ("/embed", {"inputs": "a", "options": {"dimensions": 20}}, 422, "tei"),
    ("/tokenize", {"inputs": [["a"]]}, 422, "tei"),
    ("/decode", {"ids": "a"}, 422, "tei"),
    ("/classify", {"inputs": 1}, 422, "tei"),
    ("/tag", {"inputs": "a", "aggregation": 1}, 422, "tei"),
    ("/answer", {"inputs": "a"}, 422, "tei"),
    ("/fill_mask", {"inputs": "a", "top": "5"}, 422, "tei"),
    ("/attention", {"inputs": ["a", "b"]}, 422, "tei"),
    # The JSON type is right, but the value is invalid.
    ("/embed", {"inputs": "a", "dimensions": 0}, 400, "tei"),
    ("/embed", {"inputs": "a", "dimensions": -1}, 422, "tei"),
    ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "tei"),
    ("/embed", {"inputs": [1_000_000_000]}, 422, "tei"),
    ("/embed", {"inputs": [-1]}, 422, "tei"),
    ("/embed", {"inputs": [[]]}, 422, "tei"),
    ("/rerank", {"query": "a", "texts": []}, 400, "tei"),
    ("/decode", {"ids": [1_000_000_000]}, 422, "tei"),
    ("/tag", {"inputs": "a", "aggregation": "nope"}, 422, "tei"),
    ("/fill_mask", {"inputs": "a [MASK]", "top": 0}, 400, "tei"),
    ("/fill_mask", {"inputs": "a"}, 422, "tei"),
    ("/attention", {"inputs": "a", "layer": 1000}, 400, "tei"),
    ("/attention", {"inputs": "a", "head": 1000}, 400, "tei"),
    ("/attention", {"inputs": "a", "head": "middle"}, 400, "tei"),
    ("/attention", {"inputs": "a", "format": "png"}, 422, "tei"),
    # No model of this name.
    ("/predict", {"inputs": "a", "model": "nope"}, 404, "tei"),
    ("/tokenize", {"inputs": "a", "model": "nope"}, 404, "tei"),
    ("/attention", {"inputs": "a", "model": "nope"}, 404, "tei"),
    ("/v1/embeddings", {"input": "a", "model": "nope"}, 404, "openai"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "nope"}, 404, "cohere"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "nope"}, 404, "cohere"),
    # A model of another task.
    ("/embed", {"inputs": "a", "model": "tagger"}, 424, "tei"),
    ("/embed_all", {"inputs": "a", "model": "ranker"}, 424, "tei"),
    ("/embed_sparse", {"inputs": "a", "model": "masked_lm"}, 424, "tei"),
    ("/predict", {"inputs": "a", "model": MINILM}, 424, "tei"),
    ("/rerank", {"query": "a", "texts": ["b"], "model": "sequence"}, 424, "tei"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "model": "answer"},
     424, "tei"),
    ("/classify", {"inputs": "a", "model": "tagger"}, 424, "tei"),
    ("/tag", {"inputs": "a", "model": "sequence"}, 424, "tei"),
    ("/answer", {"inputs": "a", "question": "b", "model": "tagger"}, 424, "tei"),
    ("/fill_mask", {"inputs": "a [MASK]", "model": MINILM}, 424, "tei"),
    ("/v1/embeddings", {"input": "a", "model": "tagger"}, 400, "openai"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "model": MINILM}, 400, "cohere"),
    # Any invalid request to the routes of OpenAI and Cohere.
    ("/v1/embeddings", {"model": MINILM, "input": 5}, 400, "openai"),
    ("/v1/embeddings", {"model": MINILM, "input": "a", "dimensions": "x"}, 400, "openai"),
    ("/v1/rerank", {"query": "a"}, 400, "cohere"),
    ("/v2/rerank", {"query": 1, "documents": ["b"]}, 400, "cohere"),
    ("/v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "cohere"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "cohere"),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, 400, "cohere"),
    # Texts that are too long, and too many texts.
    ("/embed", {"inputs": ["a"] * 2049}, 413, "tei"),
    ("/rerank", {"query": "a", "texts": ["a"] * 2049}, 413, "tei"),
    ("/rerank", {"query": "a", "texts": ["a"] * 2049, "return_text": True}, 413, "tei"),
    ("/tokenize", {"inputs": ["a"] * 2049}, 413, "tei"),
    ("/v1/embeddings", {"model": MINILM, "input": ["a"] * 2049}, 400, "openai"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, 400, "cohere"),
]


# Path, body, optional fields.
OPTIONAL = [
    ("/embed", {"inputs": "a"},
     ["model", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions",
      "encoding_format"]),
    ("/embed_all", {"inputs": "a"}, ["model", "truncate", "truncation_direction", "prompt_name"]),
    ("/embed_sparse", {"inputs": "a"}, ["model", "truncate", "truncation_direction", "prompt_name"]),
    ("/predict", {"inputs": "a"},
     ["model", "truncate", "truncation_direction", "raw_scores", "parameters"]),
    ("/rerank", {"query": "a", "texts": ["b"]},
     ["model", "truncate", "truncation_direction", "raw_scores", "return_text", "top_n"]),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
     ["model", "parameters"]),
    ("/tokenize", {"inputs": "a"}, ["model", "add_special_tokens", "prompt_name"]),
    ("/decode", {"ids": [101]}, ["model", "skip_special_tokens"]),
    ("/tag", {"inputs": "a"}, ["model", "aggregation"]),
    ("/answer", {"inputs": "a", "question": "b"}, ["model", "top"]),
    ("/fill_mask", {"inputs": "a [MASK]"}, ["model", "top"]),
    ("/attention", {"inputs": "a"}, ["model", "pair", "layer", "head", "format"]),
    ("/v1/embeddings", {"input": "a"}, ["model", "encoding_format", "dimensions"]),
    ("/v2/rerank", {"query": "a", "documents": ["b"]},
     ["model", "top_n", "return_documents", "max_tokens_per_doc", "max_chunks_per_doc",
      "rank_fields", "relevant_spans"]),
]


@pytest.mark.parametrize("value", [None, "", [], {}], ids=str)
@pytest.mark.parametrize("path, body, fields", OPTIONAL, ids=[path for path, *_ in OPTIONAL])
def test_a_field_without_a_value_is_ignored(models, path, body, fields, value):
    without_id = lambda response: {**response, "id": None} if "results" in response else response
    expected = without_id(models.json(path, body))
    empty = dict.fromkeys([*fields, "no_such_field"], value)
    assert_same_json(without_id(models.json(path, empty | body)), expected)
    assert_same_json(without_id(models.json(path, body | empty)), expected)


@pytest.mark.parametrize("path, body, fields", OPTIONAL, ids=[path for path, *_ in OPTIONAL])
def test_a_field_without_effect_is_ignored_and_another_is_refused_by_name(models, path, body, fields):
    ignored = {
        "user": "u", "priority": 2, "options": {"wait_for_model": True, "use_cache": False},
    }
    assert models.post(path, body | ignored).status_code == 200
    for field, value in (("no_such_field", 0), ("no_such_field", False), ("options", {"n": 1})):
        response = models.post(path, body | {field: value})
        assert response.status_code == (400 if path.startswith(("/v1", "/v2")) else 422)
        assert f"{field} is an unknown field: expected " in response.text, response.text


TRUNCATED = [
    ("/embed", {"inputs": [LONG, "a", LONG]}, 2),
    ("/embed", {"inputs": "a"}, 0),
    ("/", {"inputs": LONG}, 1),
    ("/embed_all", {"inputs": ["a", LONG]}, 1),
    ("/embed_sparse", {"inputs": [LONG, "a"]}, 1),
    ("/similarity", {"inputs": {"source_sentence": LONG, "sentences": ["a", LONG]}}, 2),
    ("/predict", {"inputs": [[LONG_LETTERS], ["a", "b"], ["a", LONG_LETTERS]]}, 2),
    ("/rerank", {"query": "a", "texts": [LONG_LETTERS, "b"]}, 1),
    ("/rerank", {"query": LONG_LETTERS, "texts": ["a", "b"]}, 2),
    ("/v1/rerank", {"query": "a", "documents": ["b", LONG_LETTERS]}, 1),
    ("/v2/rerank", {"query": "a", "documents": ["b", LONG_LETTERS]}, 1),
    ("/classify", {"inputs": [LONG_LETTERS, "a"]}, 1),
    ("/v1/embeddings", {"input": ["a", "b"]}, 0),
]


@pytest.mark.parametrize("path, body, count", TRUNCATED, ids=lambda value: str(value)[:40])
def test_a_header_has_the_number_of_truncated_texts(models, path, body, count):
    response = models.post(path, body)
    assert response.status_code == 200, describe(response)
    assert response.headers["x-truncated-texts"] == str(count)


def test_web_pages_may_read_the_number_of_truncated_texts(serve):
    server = serve("--cors", "*", "--auto-truncate")
    body = {"input": [LONG, "a", LONG]}
    response = server.post("/v1/embeddings", body, headers={"origin": "https://example.org"})
    assert response.headers["x-truncated-texts"] == "2"
    assert "x-truncated-texts" in response.headers["access-control-expose-headers"]


# A lone surrogate, as Python decodes a byte that is not UTF-8 with "surrogateescape".
LONE = "\U0001f600 \udcff"
# Path, body, name of the field in the error.
SURROGATES = [
    ("/embed", {"inputs": LONE}, "inputs"),
    ("/embed", {"inputs": ["a", LONE], "truncate": True}, "inputs[1]"),
    ("/embed", {"inputs": "a", "prompt_name": LONE}, "prompt_name"),
    ("/embed", {"inputs": "a", "no_such_field": LONE}, "no_such_field"),
    ("/", {"inputs": ["a", LONE]}, "inputs[1]"),
    ("/embed_all", {"inputs": [LONE]}, "inputs[0]"),
    ("/embed_sparse", {"inputs": ["a", LONE]}, "inputs[1]"),
    ("/predict", {"inputs": [["a", LONE]]}, "inputs[0][1]"),
    ("/rerank", {"query": LONE, "texts": ["a"]}, "query"),
    ("/rerank", {"query": "a", "texts": ["b", LONE]}, "texts[1]"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", LONE]}},
     "inputs.sentences[1]"),
    ("/tokenize", {"inputs": LONE}, "inputs"),
    ("/classify", {"inputs": LONE}, "inputs"),
    ("/tag", {"inputs": LONE}, "inputs"),
    ("/answer", {"inputs": "a", "question": LONE}, "question"),
    ("/fill_mask", {"inputs": ["[MASK]", LONE]}, "inputs[1]"),
    ("/attention", {"inputs": "a", "pair": LONE}, "pair"),
    ("/v1/embeddings", {"input": ["a", LONE]}, "input[1]"),
    ("/v2/rerank", {"query": "a", "documents": ["b", {"text": LONE}]}, "documents[1].text"),
]


class TestErrors:
    @pytest.mark.parametrize(
        "path, body, status, interface", ERRORS, ids=[f"{p}-{str(b)[:50]}" for p, b, *_ in ERRORS]
    )
    def test_an_invalid_request_has_the_documented_status(self, models, path, body, status, interface):
        response = models.post(path, body)
        assert_error(response, status, interface)

    @pytest.mark.parametrize("value", [1, "nope", ["first"], {"first": None}])
    def test_the_error_of_a_choice_lists_the_choices(self, models, value):
        response = models.post("/tag", {"inputs": "a", "aggregation": value})
        assert_error(response, 422)
        for choice in ("none", "simple", "first", "average", "max"):
            assert f"`{choice}`" in response.json()["error"], describe(response)

    @pytest.mark.parametrize("path, body, field", SURROGATES, ids=[f"{p}-{f}" for p, _, f in SURROGATES])
    def test_a_lone_surrogate_is_refused_with_the_name_of_its_field(self, models, path, body, field):
        # json.dumps writes \ud83d\ude00 for the pair and \udcff for the lone surrogate.
        response = models.client.post(
            path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        interface = {"/v1/embeddings": "openai", "/v2/rerank": "cohere"}.get(path, "tei")
        assert_error(response, 400, interface)
        error = response.json().get("error", response.json())
        message = error["message"] if isinstance(error, dict) else error
        start = f"{field} is not Unicode: expected surrogates in pairs, got a lone surrogate"
        assert message.startswith(start), message

    @pytest.mark.parametrize("path, body, message", [
        ("/embed", {"inputs": "a", "dimensions": "16"}, "dimensions has the wrong type: expected a "
         "whole number of at least 0, got string \"16\""),
        ("/embed", {"inputs": "a", "dimensions": -1}, "dimensions is invalid: expected a whole number "
         "of at least 0, got integer `-1`"),
        ("/embed", {"inputs": {}}, "inputs has the wrong type: expected a string or a list, as the "
         "field permits, got an object"),
        ("/embed", {}, "the body lacks the field `inputs`"),
        ("/embed", ["a"], "the body has the wrong type: expected a JSON object"),
        ("/similarity", {"inputs": {"source_sentence": "a"}}, "inputs lacks the field `sentences`"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", 1]}},
         "inputs.sentences[1] has the wrong type: expected a string, got integer `1`"),
        ("/decode", {"ids": [1, -1]}, "ids[1] is invalid: expected a whole number from 0 to "
         "4294967295, got integer `-1`"),
        ("/embed", {"inputs": "a", "normalize": 1}, "normalize has the wrong type: expected a "
         "boolean, got integer `1`"),
    ])
    def test_the_error_of_a_field_has_no_words_of_rust(self, models, path, body, message):
        response = models.post(path, body)
        assert_error(response, 422)
        assert response.json()["error"] == message

    @pytest.mark.parametrize("path, interface", [
        ("/embed", "tei"), ("/tag", "tei"), ("/v1/embeddings", "openai"), ("/v2/rerank", "cohere"),
    ])
    def test_a_body_that_is_not_json(self, models, path, interface):
        for body in (b"", b"{", b'{"inputs": NaN}', b'{"inputs": "a"} x', b"\xff\xfe", b'"\xff"'):
            response = models.client.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert_error(response, 400, interface)

    @pytest.mark.parametrize("path, interface", [
        ("/embed", "tei"), ("/v1/embeddings", "openai"), ("/v2/rerank", "cohere"),
    ])
    def test_a_body_of_another_type_is_refused(self, models, path, interface):
        for kind in ("text/plain", "application/x-www-form-urlencoded", None):
            headers = {"content-type": kind} if kind else {}
            response = models.client.post(path, content=b'{"inputs": "a"}', headers=headers)
            assert_error(response, 415, interface)
        kind = "application/json; charset=utf-8"
        response = models.client.post(
            "/embed", content=b'{"inputs": "a"}', headers={"content-type": kind}
        )
        assert response.status_code == 200, describe(response)

    @pytest.mark.parametrize("path, interface", [
        ("/embed", "tei"), ("/v1/embeddings", "openai"), ("/v2/rerank", "cohere"),
    ])
    def test_a_wrong_method_is_refused(self, models, path, interface):
        response = models.client.get(path)
        assert_error(response, 405, interface)
        assert "POST" in response.headers.get("allow", "")

    @pytest.mark.parametrize("path, body, interface", [
        ("/embed", {"inputs": "a"}, "tei"),
        ("/v1/embeddings", {"model": MINILM, "input": "a"}, "openai"),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, "cohere"),
    ])
    def test_a_key_is_required(self, keyed, path, body, interface):
        assert_error(keyed.post(path, body), 401, interface)
        wrong = {"authorization": "Bearer wrong"}
        assert_error(keyed.post(path, body, headers=wrong), 401, interface)

    def test_more_requests_than_max_requests_are_refused(self, serve):
        # A batch that is not full waits three seconds, so the first request stays in progress.
        server = serve("--max-requests", "1", "--batch-delay", "3000")
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.post, "/embed", {"inputs": "a"})
            # A request counts after its body has arrived.
            is_queued = lambda: "encodle_queue_requests 1\n" in server.get("/metrics").text
            wait_until(is_queued, 5, "the request for /embed is in the queue")
            for path, body, interface in [
                ("/v1/embeddings", {"model": MINILM, "input": "a"}, "openai"),
                ("/embed", {"inputs": "a"}, "tei"),
                ("/v2/rerank", {"query": "a", "documents": ["b"]}, "cohere"),
            ]:
                response = server.post(path, body)
                assert_error(response, 429, interface)
                assert int(response.headers["retry-after"]) >= 1
            assert server.get("/health").status_code == 200, "/health counts as a request"
            assert first.result().status_code == 200
