"""The interface of sentence-transformers: arguments, attributes and results that its users expect."""

import copy
import enum
import pickle
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from conftest import GOLDEN, MINILM, assert_close

import encodle

TEXTS = ["A man is eating food.", "A man eats.", "It snows."]
HEADS = GOLDEN / "heads"
KINDS = [encodle.SentenceTransformer, encodle.SparseEncoder, encodle.MultiVectorEncoder, encodle.CrossEncoder]
PAIRS = [("bad cab", "a cab"), ("a", "b c d e f")]


@pytest.fixture(scope="module")
def ranker():
    return encodle.CrossEncoder(HEADS / "score")


def hub_folder(cache, name):
    """A folder of the cache of the hub with all-MiniLM-L6-v2 under the name `org/name`."""
    repository = cache / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    commit = "c0ffee" + "0" * 34
    (repository / "refs/main").write_text(commit)
    shutil.copytree(MINILM, repository / "snapshots" / commit)
    return cache


class TestConstructors:
    def test_the_dtype_in_model_kwargs_selects_the_precision(self):
        half = encodle.SentenceTransformer(precision="bf16")
        of_torch = type("dtype", (), {"__str__": lambda self: "torch.bfloat16"})()
        for dtype in ("bfloat16", of_torch):
            for name in ("dtype", "torch_dtype"):
                other = encodle.SentenceTransformer(backend="torch", model_kwargs={name: dtype})
                assert (other.encode(TEXTS) == half.encode(TEXTS)).all()
        ranker = encodle.CrossEncoder(HEADS / "score", model_kwargs={"dtype": "bfloat16"})
        expected = encodle.CrossEncoder(HEADS / "score", precision="bf16")
        assert (ranker.predict(PAIRS) == expected.predict(PAIRS)).all()

    def test_model_kwargs_that_cannot_change_the_result_are_ignored(self, model):
        settings = {"attn_implementation": "eager", "low_cpu_mem_usage": False, "device_map": None}
        other = encodle.SentenceTransformer(model_kwargs=settings)
        assert (other.encode(TEXTS) == model.encode(TEXTS)).all()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"backend": "onnx"}, "backend 'onnx' is not supported: expected \"torch\""),
            ({"model_kwargs": {"file_name": "a"}}, r"model_kwargs \['file_name'\] are not supported"),
            ({"model_kwargs": {"dtype": "auto"}}, "dtype 'auto' is not supported: expected one of"),
            ({"model_kwargs": {"dtype": "float16"}, "precision": "int8"}, "expected one of the arguments"),
        ],
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_backends_and_model_kwargs_are_errors(self, kind, arguments, message):
        with pytest.raises(ValueError, match=message):
            kind(HEADS / "score", **arguments)

    def test_a_cross_encoder_has_the_given_labels_length_and_activation(self, ranker):
        other = encodle.CrossEncoder(HEADS / "score", num_labels=1, max_length=5, activation_fn=np.array)
        assert other.max_length == other.max_seq_length == 5
        logits = ranker.predict([("a", "b"), ("a", "b c")], activation_fn=np.array)
        # [CLS] a [SEP] b [SEP]
        assert_close(other.predict(PAIRS[1]), logits[0], 0)
        assert_close(pickle.loads(pickle.dumps(other)).predict(PAIRS[1]), logits[0], 0)
        other.max_length = 6
        assert_close(other.predict(PAIRS[1]), logits[1], 0)
        with pytest.raises(ValueError, match="num_labels is 3: expected 1, the number of labels"):
            encodle.CrossEncoder(HEADS / "score", num_labels=3)
        with pytest.raises(encodle.EncodleError, match="the number of the model"):
            other.max_length = 5000

    def test_models_are_read_from_the_cache_folder(self, model, tmp_path, monkeypatch):
        hub_folder(tmp_path / "cache", "org/name")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
        monkeypatch.chdir(tmp_path)
        settings = {"cache_folder": "cache", "local_files_only": True, "token": "x"}
        other = encodle.SentenceTransformer("org/name", **settings)
        monkeypatch.chdir("/")
        for opened in (other, pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):
            assert (opened.encode(TEXTS) == encodle.SentenceTransformer(MINILM).encode(TEXTS)).all()
        assert b"secret" not in pickle.dumps(
            encodle.SentenceTransformer("org/name", cache_folder=tmp_path / "cache", token="secret")
        )
        for kind in KINDS:
            with pytest.raises(encodle.EncodleError, match="is not in the cache"):
                kind("org/name", local_files_only=True)
        with pytest.raises(TypeError, match="token is int: expected a str, a bool or None"):
            encodle.SentenceTransformer(token=5)

    def test_the_token_replaces_that_of_the_environment(self, tmp_path, monkeypatch):
        tokens = []

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                tokens.append(self.headers["Authorization"])
                self.send_error(404)

            do_GET = do_HEAD

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_TOKEN", "environment")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for token, sent in [
            ("given", "Bearer given"),
            (None, "Bearer environment"),
            (True, "Bearer environment"),
            (False, None),
        ]:
            for kind in KINDS:
                tokens.clear()
                with pytest.raises(encodle.EncodleError):
                    kind("org/name", token=token)
                assert tokens and set(tokens) == {sent}
                tokens.clear()
                with pytest.raises(encodle.EncodleError):
                    kind("org/name", token=token, local_files_only=True)
                assert not tokens
        server.shutdown()
        server.server_close()


class TestAttributes:
    def test_the_device_is_the_cpu(self, model, ranker):
        for m in (model, ranker):
            assert m.device == "cpu" and m.device.type == "cpu" and m.device != "cuda"
            assert m.to("cpu") is m and m.cpu() is m and m.eval() is m
            with pytest.raises(encodle.EncodleError, match="device 'cuda' is not supported"):
                m.to("cuda")

    def test_the_device_is_equal_to_that_of_torch(self, model):
        torch = pytest.importorskip("torch")
        assert torch.zeros(1).device == model.device == torch.device("cpu")
        assert torch.zeros(1).to(model.device).device.type == "cpu"
        assert model.to(torch.device("cpu")) is model

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("fit", "does not train"),
            ("save_to_hub", "copy the model's folder"),
            ("start_multi_process_pool", "encodle.BatchEmbedder"),
            ("encode_multi_process", "encodle.BatchEmbedder"),
            ("half", "the argument precision"),
            ("tokenizer", "tokenize"),
        ],
    )
    def test_the_error_of_an_absent_attribute_says_what_to_use(self, model, ranker, name, instead):
        for m in (model, ranker):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*{instead}"):
                getattr(m, name)
            assert not hasattr(m, name)
        with pytest.raises(AttributeError, match="has no attribute 'colour'$"):
            _ = model.colour

    def test_models_can_be_copied(self, model, ranker):
        assert (copy.deepcopy(model).encode(TEXTS) == model.encode(TEXTS)).all()
        assert (copy.copy(ranker).predict(PAIRS) == ranker.predict(PAIRS)).all()

    def test_an_evaluator_stores_its_metrics(self, ranker, tmp_path):
        def evaluator(model, output_path):
            metrics = {"score": float(model.predict(PAIRS[0]))}
            model.model_card_data.set_evaluation_metrics(evaluator, metrics, epoch=1, step=2)
            return output_path, metrics

        path, metrics = ranker.evaluate(evaluator, tmp_path / "results")
        assert path.is_dir() and ranker.model_card_data.metrics == {evaluator: metrics}
        assert encodle.SentenceTransformer(model_card_data="card").model_card_data == "card"

    def test_an_evaluator_of_sentence_transformers_runs(self, model):
        evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
        query = "someone is having lunch"
        best = int(model.similarity(model.encode(query), model.encode(TEXTS)).argmax())
        found = evaluation.InformationRetrievalEvaluator(
            {"q": query}, dict(enumerate(TEXTS)), {"q": {best}}, map_at_k=[3], write_csv=False
        )(model)
        assert found["cosine_map@3"] == 1


class TestSimilarity:
    def test_tensors_give_tensors(self, model):
        torch = pytest.importorskip("torch")
        vectors = model.encode(TEXTS)
        tensors = torch.from_numpy(vectors)
        for function in (model.similarity, model.similarity_pairwise):
            expected = function(vectors, vectors)
            assert isinstance(expected, np.ndarray)
            for left, right in [(tensors, tensors), (tensors, vectors), (vectors, list(tensors))]:
                found = function(left, right)
                assert isinstance(found, torch.Tensor) and (found.numpy() == expected).all()

    def test_functions_may_be_named_by_an_enum_or_as_in_sentence_transformers(self):
        class Other(enum.Enum):
            MANHATTAN = "manhattan"

        model = encodle.SentenceTransformer(similarity_fn_name=encodle.SimilarityFunction.EUCLIDEAN)
        assert model.similarity_fn_name == "euclidean"
        for function, name in [
            ("cos_sim", "cosine"),
            ("dot_score", "dot"),
            (encodle.SimilarityFunction.DOT, "dot"),
            (Other.MANHATTAN, "manhattan"),
        ]:
            model.similarity_fn_name = function
            assert model.similarity_fn_name == name
        of_several_vectors = encodle.MultiVectorEncoder.SUPPORTED_SIMILARITY_FN_NAMES
        names = [*model.SUPPORTED_SIMILARITY_FN_NAMES, *of_several_vectors]
        assert encodle.SimilarityFunction.possible_values() == names

    @pytest.mark.parametrize("vectors", [None, {0.5}, "0.5", ["0.5"], [["a"]]])
    def test_vectors_that_are_not_numbers_are_a_type_error(self, model, vectors):
        for call in (
            lambda: model.similarity(vectors, [[0.5]]),
            lambda: model.similarity_pairwise([[0.5]], vectors),
            lambda: encodle.quantize_embeddings(vectors, "ubinary"),
        ):
            with pytest.raises(TypeError, match="vectors are of type .*: expected an array, a tensor or"):
                call()


class TestCalls:
    def test_arguments_that_cannot_change_the_vectors_are_accepted(self, model, ranker):
        vectors = model.encode(TEXTS, precision=None, pool=None, chunk_size=7, task="query")
        assert (vectors == model.encode(TEXTS)).all()
        scores = ranker.predict(PAIRS, pool=None, chunk_size=None)
        assert (scores == ranker.predict(PAIRS)).all()
        for call in (model.encode, ranker.predict):
            with pytest.raises(encodle.EncodleError, match="pool is not supported: expected None"):
                call(PAIRS, pool={})
        with pytest.raises(encodle.EncodleError, match=r"device \['cpu', 'cpu'\] is not supported"):
            model.encode(TEXTS, device=["cpu", "cpu"])

    def test_a_subclass_gets_the_arguments_of_encode_query_by_name(self):
        class Recorder(encodle.SentenceTransformer):
            def encode(self, **arguments):
                return arguments

        got = Recorder(prompts={"query": "q: "}).encode_query("a", None, None, 8, truncate_dim=3)
        assert got == {
            "inputs": "a",
            "prompt_name": "query",
            "prompt": None,
            "batch_size": 8,
            "truncate_dim": 3,
            "task": "query",
        }

    def test_output_value_none_gives_all_values_of_each_text(self, model):
        features = model.encode(TEXTS, output_value=None, prompt="a: ", truncate_dim=7)
        states = model.encode(TEXTS, output_value="token_embeddings", prompt="a: ")
        vectors = model.encode(TEXTS, prompt="a: ", truncate_dim=7)
        tokens = model.preprocess(TEXTS, prompt="a: ")
        for i, found in enumerate(features):
            assert (found["token_embeddings"] == states[i]).all()
            assert (found["sentence_embedding"] == vectors[i]).all()
            for name, padded in tokens.items():
                assert (found[name] == padded[i, : len(states[i])]).all()
            assert found["attention_mask"].all()
        single = model.encode(TEXTS[0], output_value=None)
        assert single.keys() == features[0].keys() and single["sentence_embedding"].shape == (384,)
        with pytest.raises(ValueError, match="expected their defaults with output_value=None"):
            model.encode(TEXTS, output_value=None, precision="int8")

    @pytest.mark.parametrize(
        "texts", [None, {"a", "b"}, frozenset("a"), {"a": "b"}, b"a"], ids=lambda texts: type(texts).__name__
    )
    def test_texts_without_an_order_are_a_type_error(self, model, texts):
        pipelines = [
            model.encode,
            model.tokenize,
            encodle.TextClassifier(HEADS / "sequence").classify,
            encodle.TokenClassifier(HEADS / "tagger").tag,
            encodle.MaskFiller(HEADS / "masked_lm").fill_mask,
            lambda texts: encodle.QuestionAnswerer(HEADS / "answer").answer("a", texts),
        ]
        for call in pipelines:
            with pytest.raises(TypeError, match="^texts are of type .*: expected a str, a sequence of str"):
                call(texts)

    @pytest.mark.parametrize("value", ["3", 3.0, [3], object])
    def test_a_number_of_another_type_is_a_type_error(self, model, ranker, value):
        answerer = encodle.QuestionAnswerer(HEADS / "answer")
        attention = encodle.AttentionReader().attentions("a")[0]
        for name, call in [
            ("batch_size", lambda: model.encode("a", batch_size=value)),
            ("truncate_dim", lambda: model.encode("a", truncate_dim=value)),
            ("chunk_size", lambda: model.encode("a", chunk_size=value)),
            ("truncate_dim", lambda: encodle.SentenceTransformer(truncate_dim=value)),
            ("threads", lambda: encodle.SentenceTransformer(threads=value)),
            ("token_budget", lambda: encodle.SentenceTransformer(token_budget=value)),
            ("max_length", lambda: encodle.CrossEncoder(HEADS / "score", max_length=value)),
            ("top_k", lambda: ranker.rank("a", ["b"], top_k=value)),
            ("top_k", lambda: answerer.answer("a", "b", top_k=value)),
            ("layer", lambda: attention.svg(layer=value)),
        ]:
            with pytest.raises(TypeError, match=f"^{name} is .*: expected (a|0 or a) positive integer"):
                call()
        with pytest.raises(TypeError, match="^max_seq_length is .*: expected a positive integer"):
            model.max_seq_length = value

    @pytest.mark.parametrize("value", [None, 5, b"a"])
    def test_a_text_of_another_type_is_a_type_error_that_names_the_argument(self, ranker, value):
        for message, call in [
            ("^question is", lambda: encodle.QuestionAnswerer(HEADS / "answer").answer(value, "a")),
            ("^text is", lambda: encodle.AttentionReader().attentions(value)),
            ("^pair 0 contains", lambda: ranker.rank(value, ["a"])),
            ("^pair 0 contains", lambda: ranker.rank("a", [value])),
            ("^inputs is", lambda: ranker.predict(value)),
            ("^documents is", lambda: ranker.rank("a", value)),
        ]:
            with pytest.raises(TypeError, match=message):
                call()

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("prompts", "query: ", "expected a dict from names to texts"),
            ("pooling", {"cls", "mean"}, "expected a str, or a list of str"),
            ("pooling", 5, "expected a str, or a list of str"),
            ("model", 5, "expected a str or a path"),
            ("model", b"all-MiniLM-L6-v2", "expected a str or a path"),
            ("cache_folder", 5, "expected a str or a path"),
            ("revision", 5, "expected str"),
            ("model_kwargs", "bfloat16", "expected a dict"),
        ],
    )
    def test_a_setting_of_another_type_is_a_type_error_that_names_the_argument(self, name, value, expected):
        arguments = {"model_name_or_path" if name == "model" else name: value}
        with pytest.raises(TypeError, match=f"^{name} is .*: {expected}"):
            encodle.SentenceTransformer(**arguments)

    def test_the_errors_of_other_types_name_the_argument(self, model, tmp_path):
        for message, call in [
            ("^prompt_name is ", lambda: model.encode("a", prompt_name=["query"])),
            ("^input is 5", lambda: encodle.embed_file(5, tmp_path / "a.npy")),
            ("^output is 5", lambda: encodle.embed_file(tmp_path / "a.txt", 5)),
            ("^vectors are of type str", lambda: encodle.quantize_embeddings([[0.5]], "int8", "0.5")),
        ]:
            with pytest.raises(TypeError, match=message):
                call()
        with pytest.raises(ValueError, match="^truncate_dim is 1000000000000000000000: expected at most"):
            model.encode("a", truncate_dim=10**21)
        with pytest.raises(ValueError, match="^vectors cannot be made an array: "):
            model.similarity([[0.5], [0.5, 1]], [[0.5]])
