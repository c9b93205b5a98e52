"""The client libraries of other services receive from `encodle serve` the numbers that the commands
print, bit for bit as f32. Similarities are compared with the cosines of the vectors that
`encodle embed` prints, with a tolerance of 1e-6.

docs/server.md lists the fields that each client sends. Clients with large or conflicting
dependencies are not installed; their tests send the bodies that their sources build, and name the
versions."""

import asyncio
import json
import re
import subprocess

import cohere
import numpy as np
import openai
import pytest
import tiktoken
from conftest import (
    ENCODLE, KEYS, MINILM, MODELS, ROOT, assert_same_bits, assert_same_json,
    encodle, encodle_embed, f32, shorten,
)
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank

TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "Größe, naïveté, 東京 and 😀",
    "x",
    "one two three four five six seven eight nine ten " * 10,
]
# Texts of the tiny models, whose vocabulary is the letters a to x.
LETTERS = ["a bad cab", "a bead", "fed a bad deaf cab", "x"]
QUERY = "bad"


@pytest.fixture(scope="module")
def vectors():
    return encodle_embed(TEXTS)


def openai_client(server, key="unused"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


class TestOpenAi:
    def test_a_string_gives_the_vector_of_the_command(self, server, vectors):
        # The client asks for base64 unless encoding_format is given.
        response = openai_client(server).embeddings.create(model=MINILM, input=TEXTS[0])
        assert len(response.data) == 1 and response.data[0].index == 0
        assert_same_bits(response.data[0].embedding, vectors[0])

    @pytest.mark.parametrize("encoding_format", ["float", "base64"])
    def test_a_list_gives_one_vector_per_text_in_order(self, server, vectors, encoding_format):
        client = openai_client(server)
        if encoding_format == "base64":
            response = client.embeddings.create(model=MINILM, input=TEXTS)
        else:
            response = client.embeddings.create(model=MINILM, input=TEXTS, encoding_format="float")
        assert [data.index for data in response.data] == list(range(len(TEXTS)))
        assert_same_bits([data.embedding for data in response.data], vectors)
        assert response.object == "list" and response.model == MINILM
        assert {data.object for data in response.data} == {"embedding"}

    def test_a_large_batch(self, server):
        texts = [f"{text} {i}" for i in range(60) for text in TEXTS]
        response = openai_client(server).embeddings.create(model=MINILM, input=texts)
        assert_same_bits([data.embedding for data in response.data], encodle_embed(texts))

    def test_an_empty_text_gives_the_vector_of_the_command(self, server):
        # langchain-openai sends "" for an empty text.
        response = openai_client(server).embeddings.create(model=MINILM, input="")
        assert_same_bits(response.data[0].embedding, encodle_embed([""])[0])

    def test_token_ids_give_the_vectors_of_their_texts(self, server, vectors):
        tokens = server.json("/tokenize", {"inputs": TEXTS})
        ids = [[token["id"] for token in text] for text in tokens]
        client = openai_client(server)
        one = client.embeddings.create(model=MINILM, input=ids[0])
        assert_same_bits(one.data[0].embedding, vectors[0])
        several = client.embeddings.create(model=MINILM, input=ids)
        assert_same_bits([data.embedding for data in several.data], vectors)

    def test_dimensions_truncates_and_normalises(self, server):
        response = openai_client(server).embeddings.create(model=MINILM, input=TEXTS, dimensions=64)
        embeddings = [data.embedding for data in response.data]
        assert_same_bits(embeddings, encodle_embed(TEXTS, "--dimensions", "64"))

    @pytest.mark.parametrize("dimensions", [0, 385, -1])
    def test_dimensions_out_of_range_are_refused(self, server, dimensions):
        with pytest.raises(openai.BadRequestError):
            openai_client(server).embeddings.create(
                model=MINILM, input="x", dimensions=dimensions
            )

    def test_usage_counts_the_tokens_of_all_texts(self, server):
        tokens = server.json("/tokenize", {"inputs": TEXTS})
        expected = sum(map(len, tokens))
        usage = openai_client(server).embeddings.create(model=MINILM, input=TEXTS).usage
        assert (usage.prompt_tokens, usage.total_tokens) == (expected, expected)

    def test_user_is_accepted(self, server, vectors):
        response = openai_client(server).embeddings.create(model=MINILM, input=TEXTS, user="u")
        assert_same_bits([data.embedding for data in response.data], vectors)

    def test_models_are_listed(self, models):
        found = openai_client(models).models.list()
        assert [model.id for model in found] == list(MODELS)
        assert {model.object for model in found.data} == {"model"}

    def test_a_model_is_retrieved_by_its_name(self, models):
        model = openai_client(models).models.retrieve("sentences")
        assert (model.id, model.object) == ("sentences", "model")

    def test_a_name_may_contain_a_slash(self, serve):
        # The client sends GET /v1/models/team%2Fsentences.
        server = serve("--model", f"team/sentences={MODELS['sentences']}")
        client = openai_client(server)
        assert client.models.retrieve("team/sentences").id == "team/sentences"
        response = client.embeddings.create(model="team/sentences", input=LETTERS)
        expected = encodle_embed(LETTERS, "--model", MODELS["sentences"])
        assert_same_bits([data.embedding for data in response.data], expected)

    def test_every_embedding_model_is_selected_by_name(self, models):
        for name in (MINILM, "sentences"):
            response = openai_client(models).embeddings.create(model=name, input=LETTERS)
            expected = encodle_embed(LETTERS, "--model", MODELS[name])
            assert_same_bits([data.embedding for data in response.data], expected, name)
            assert response.model == name

    def test_an_unknown_model_is_not_found_if_there_are_several(self, models):
        client = openai_client(models)
        with pytest.raises(openai.NotFoundError) as error:
            client.embeddings.create(model="no-such-model", input="x")
        assert "no-such-model" in error.value.message
        assert error.value.code == "model_not_found"

    def test_a_server_with_one_model_ignores_the_name(self, server, vectors):
        client = openai_client(server)
        response = client.embeddings.create(model="text-embedding-3-small", input=TEXTS)
        assert_same_bits([data.embedding for data in response.data], vectors)
        assert response.model == MINILM
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("text-embedding-3-small")

    def test_invalid_requests_are_bad_requests(self, server):
        client = openai_client(server)
        long = "word " * 2000
        for arguments in (
            {"input": long},
            {"input": []},
            {"input": [0, 1_000_000_000]},
            {"input": {"text": "x"}},
            {"input": "x", "encoding_format": "hex"},
            {"input": "x", "extra_body": {"no_such_field": 1}},
        ):
            with pytest.raises(openai.BadRequestError) as error:
                client.embeddings.create(model=MINILM, **arguments)
                pytest.fail(f"accepted {shorten(str(arguments))}")
            assert error.value.message

    def test_the_default_is_the_first_embedding_model(self, serve):
        server = serve(*(f"--model={name}={MODELS[name]}" for name in ("tagger", "sentences")))
        expected = encodle_embed(LETTERS, "--model", MODELS["sentences"])
        for body in ({"input": LETTERS}, {"input": LETTERS, "model": ""}):
            response = server.json("/v1/embeddings", body)
            assert_same_bits([data["embedding"] for data in response["data"]], expected)
            assert response["model"] == "sentences"

    def test_a_wrong_key_is_refused_and_a_right_one_accepted(self, keyed, vectors):
        for key in ("wrong", KEYS[0][:-1], KEYS[0] + "x"):
            with pytest.raises(openai.AuthenticationError):
                openai_client(keyed, key).embeddings.create(model=MINILM, input="x")
        for key in KEYS:
            response = openai_client(keyed, key).embeddings.create(model=MINILM, input=TEXTS)
            assert_same_bits([data.embedding for data in response.data], vectors)

    def test_the_asynchronous_client(self, server):
        async def embed():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
                requests = [client.embeddings.create(model=MINILM, input=t) for t in texts]
                return await asyncio.gather(*requests)

        texts = [f"{text} {i}" for i in range(8) for text in TEXTS]
        responses = asyncio.run(embed())
        assert_same_bits([response.data[0].embedding for response in responses], encodle_embed(texts))


class TestHuggingFaceHub:
    """InferenceClient(URL) posts every task to the URL itself."""

    @pytest.mark.parametrize("path", ["", "/", "/embed"])
    def test_feature_extraction(self, server, vectors, path):
        client = InferenceClient(server.url + path)
        assert_same_bits(client.feature_extraction(TEXTS[0]), vectors[:1])
        assert_same_bits(client.feature_extraction(TEXTS), vectors)

    def test_feature_extraction_with_options(self, models):
        client = InferenceClient(f"{models.url}/embed")
        long = "a " * 500
        found = client.feature_extraction(
            [TEXTS[0], long], truncate=True, truncation_direction="right", normalize=True,
            dimensions=64, encoding_format="float",
        )
        assert_same_bits(found, encodle_embed([TEXTS[0], long], "--dimensions", "64"))
        with pytest.raises(HfHubHTTPError) as error:
            client.feature_extraction(TEXTS, encoding_format="base64")
        assert "encoding_format is unknown: expected `float`" in error.value.response.text

    def test_feature_extraction_with_a_prompt(self, serve):
        folder = MODELS["sentences"]
        client = InferenceClient(serve("--model", folder).url)
        for prompt in ("query", "document"):
            found = client.feature_extraction(LETTERS, prompt_name=prompt)
            expected = encodle_embed(LETTERS, "--model", folder, "--prompt-name", prompt)
            assert_same_bits(found, expected, prompt)

    @pytest.mark.parametrize("path", ["", "/similarity"])
    def test_sentence_similarity(self, server, vectors, path):
        # The client sends {"inputs": {"source_sentence", "sentences"}, "parameters": {}}.
        client = InferenceClient(server.url + path)
        found = client.sentence_similarity(TEXTS[0], TEXTS[1:])
        cosines = vectors[1:].astype(np.float64) @ vectors[0].astype(np.float64)
        assert np.abs(np.array(found) - cosines).max() < 1e-6

    def test_text_classification(self, models):
        # The client sends {"inputs": TEXT, "parameters": {}} and returns the first element.
        client = InferenceClient(f"{models.url}/predict")
        [expected] = encodle("classify", "--model", MODELS["sequence"], LETTERS[0])
        for options in ({}, {"top_k": 1}, {"top_k": 2, "function_to_apply": "softmax"}):
            found = client.text_classification(LETTERS[0], **options)
            assert found.label == expected["label"]
            assert f32(found.score) == f32(expected["score"])
        [best, *_] = models.json("/predict", {"inputs": LETTERS[0], "raw_scores": True})
        found = client.text_classification(LETTERS[0], function_to_apply="none")
        assert f32(found.score) == f32(best["score"])

    def test_options_that_cannot_change_the_result_are_ignored(self, models):
        # langchain-community 0.4.1, HuggingFaceInferenceAPIEmbeddings; older versions of this client.
        options = {"wait_for_model": True, "use_cache": True}
        for path, body in (
            ("/embed", {"inputs": LETTERS}),
            ("/", {"inputs": LETTERS}),
            ("/predict", {"inputs": LETTERS[0]}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": LETTERS}}),
        ):
            expected = models.json(path, body)
            for ignored in ({"options": options}, {"options": {}, "parameters": {}}):
                assert_same_json(models.json(path, body | ignored), expected)

    def test_a_token_is_an_api_key(self, keyed, vectors):
        client = InferenceClient(keyed.url, token=KEYS[0])
        assert_same_bits(client.feature_extraction(TEXTS), vectors)
        with pytest.raises(HfHubHTTPError) as error:
            InferenceClient(keyed.url, token="wrong").feature_extraction("x")
        assert error.value.response.status_code == 401


class TestLangChain:
    def embeddings(self, server, **options):
        url = f"{server.url}/v1"
        return OpenAIEmbeddings(model=MINILM, base_url=url, api_key="unused", max_retries=0, **options)

    def test_texts_are_sent_with_check_embedding_ctx_length_false(self, server, vectors):
        embeddings = self.embeddings(server, check_embedding_ctx_length=False)
        assert_same_bits(embeddings.embed_documents(TEXTS), vectors)
        assert_same_bits(embeddings.embed_query(TEXTS[0]), vectors[0])
        assert_same_bits(asyncio.run(embeddings.aembed_documents(TEXTS)), vectors)

    def test_batches_of_chunk_size(self, server, vectors):
        embeddings = self.embeddings(server, check_embedding_ctx_length=False, chunk_size=2)
        assert_same_bits(embeddings.embed_documents(TEXTS), vectors)

    def test_token_ids_of_another_vocabulary_are_refused(self, server, monkeypatch):
        # By default, the client sends ids of OpenAI's tokenizers, whose vocabulary is larger.
        class Encoding:
            def encode_ordinary(self, text):
                return [99_000 + i for i, _ in enumerate(text.split())]

        monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: Encoding())
        with pytest.raises(openai.BadRequestError):
            self.embeddings(server).embed_documents(TEXTS)


class TestLlamaIndex:
    @pytest.mark.parametrize("kind", [OpenAIEmbedding, OpenAILikeEmbedding])
    def test_vectors_of_texts_and_queries(self, server, kind):
        # The client replaces line breaks by spaces. `model=` accepts OpenAI's models only.
        texts = [*TEXTS, "two\nlines"]
        expected = encodle_embed([text.replace("\n", " ") for text in texts])
        embedding = kind(
            model_name=MINILM, api_base=f"{server.url}/v1", api_key="unused", max_retries=1
        )
        assert_same_bits(embedding.get_text_embedding_batch(texts), expected)
        assert_same_bits(embedding.get_query_embedding(texts[0]), expected[0])
        assert_same_bits(asyncio.run(embedding.aget_text_embedding_batch(texts)), expected)

    def test_dimensions(self, server):
        embedding = OpenAILikeEmbedding(
            model_name=MINILM, api_base=f"{server.url}/v1", dimensions=32, max_retries=1
        )
        expected = encodle_embed(TEXTS, "--dimensions", "32")
        assert_same_bits(embedding.get_text_embedding_batch(TEXTS), expected)


    def test_vectors_of_the_client_of_tei(self, server, vectors):
        # The client sends {"inputs", "truncate"}.
        embedding = TextEmbeddingsInference(model_name="x", base_url=server.url)
        assert_same_bits(embedding.get_text_embedding_batch(TEXTS), vectors)
        assert_same_bits(embedding.get_query_embedding(TEXTS[0]), vectors[0])
        assert_same_bits(asyncio.run(embedding.aget_text_embedding(TEXTS[1])), vectors[1])

    def test_the_reranker_of_tei_ranks_long_texts(self, models):
        # The client sends {"query", "texts"}, and selects the best results itself.
        texts = [*LETTERS, "a bad cab " * 200]
        rows = encodle("rerank", "--model", MODELS["ranker"], "--query", QUERY, *texts)
        nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]
        reranker = TeiRerank(base_url=models.url, top_n=3)
        found = reranker.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY))
        assert [(node.text, f32(node.score)) for node in found] == [
            (row["text"], f32(row["score"])) for row in rows[:3]
        ]


@pytest.fixture(scope="module")
def ranked():
    """What `encodle rerank` prints."""
    return encodle("rerank", "--model", MODELS["ranker"], "--query", QUERY, *LETTERS)


def assert_ranked(results, ranked):
    found = [(result.index, f32(result.relevance_score)) for result in results]
    expected = [(row["document"] - 1, f32(row["score"])) for row in ranked]
    assert found == expected


class TestCohere:
    @pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
    def test_rerank_equals_the_command(self, models, ranked, kind):
        client = kind("unused", base_url=models.url)
        response = client.rerank(model="ranker", query=QUERY, documents=LETTERS)
        assert_ranked(response.results, ranked)
        assert response.id and response.meta.api_version.version
        assert response.meta.billed_units.search_units == 1

    @pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
    def test_top_n(self, models, ranked, kind):
        client = kind("unused", base_url=models.url)
        for n in (1, 2, 100):
            response = client.rerank(model="ranker", query=QUERY, documents=LETTERS, top_n=n)
            assert_ranked(response.results, ranked[:n])

    def test_the_model_is_optional_in_version_1(self, models, ranked):
        # Without `model`, the server uses the first model with one label.
        client = cohere.Client("unused", base_url=models.url)
        assert_ranked(client.rerank(query=QUERY, documents=LETTERS).results, ranked)

    def test_documents_may_be_objects_and_are_returned_on_request(self, models, ranked):
        client = cohere.Client("unused", base_url=models.url)
        documents = [{"text": text} for text in LETTERS]
        response = client.rerank(query=QUERY, documents=documents, return_documents=True)
        assert_ranked(response.results, ranked)
        assert [result.document.text for result in response.results] == [r["text"] for r in ranked]
        plain = client.rerank(query=QUERY, documents=documents)
        assert all(result.document is None for result in plain.results)

    def test_the_asynchronous_client(self, models, ranked):
        async def rerank():
            async with cohere.AsyncClientV2("unused", base_url=models.url) as client:
                return await client.rerank(model="ranker", query=QUERY, documents=LETTERS)

        assert_ranked(asyncio.run(rerank()).results, ranked)

    def test_long_documents_are_truncated(self, models):
        long = "a bad cab " * 200
        client = cohere.ClientV2("unused", base_url=models.url)
        response = client.rerank(model="ranker", query=QUERY, documents=[long, "x"])
        assert_ranked(
            response.results,
            encodle("rerank", "--model", MODELS["ranker"], "--query", QUERY, long, "x"),
        )

    def test_limits_that_do_not_apply_are_accepted(self, models, ranked):
        two = cohere.ClientV2("unused", base_url=models.url)
        # 4096 is Cohere's default; the maximum length of the model is 32.
        for n in (32, 4096):
            response = two.rerank(
                model="ranker", query=QUERY, documents=LETTERS, max_tokens_per_doc=n
            )
            assert_ranked(response.results, ranked)
        one = cohere.Client("unused", base_url=models.url)
        response = one.rerank(query=QUERY, documents=LETTERS, max_chunks_per_doc=1)
        assert_ranked(response.results, ranked)

    def test_priority_and_disabled_spans_are_ignored(self, models, ranked):
        client = cohere.ClientV2("unused", base_url=models.url)
        spans = cohere.RerankRelevantSpans(mode="disabled", threshold=0.1, max_spans=3)
        rerank = lambda **options: client.rerank(
            model="ranker", query=QUERY, documents=LETTERS, **options
        )
        assert_ranked(rerank(priority=5, relevant_spans=spans).results, ranked)
        with pytest.raises(cohere.BadRequestError) as error:
            rerank(relevant_spans=cohere.RerankRelevantSpans(mode="enabled"))
        assert error.value.body["message"].startswith("relevant_spans.mode is unknown: expected `disabled`")

    def test_a_server_with_one_model_ignores_the_name(self, serve, ranked):
        client = cohere.ClientV2("unused", base_url=serve("--model", MODELS["ranker"]).url)
        response = client.rerank(model="rerank-v3.5", query=QUERY, documents=LETTERS)
        assert_ranked(response.results, ranked)

    def test_errors(self, models, keyed):
        client = cohere.ClientV2("unused", base_url=models.url)
        with pytest.raises(cohere.NotFoundError) as error:
            client.rerank(model="no-such-model", query="a", documents=["b"])
        assert "no-such-model" in error.value.body["message"]
        with pytest.raises(cohere.BadRequestError) as error:
            client.rerank(model="ranker", query="a", documents=["b"], max_tokens_per_doc=3)
        assert "max_tokens_per_doc" in error.value.body["message"]
        one = cohere.Client("unused", base_url=models.url)
        for refused in ({"max_chunks_per_doc": 2}, {"rank_fields": ["text"]}):
            with pytest.raises(cohere.BadRequestError):
                one.rerank(query="a", documents=["b"], **refused)
        with pytest.raises(cohere.UnauthorizedError):
            cohere.ClientV2("wrong", base_url=keyed.url).rerank(
                model=MINILM, query="a", documents=["b"]
            )


class TestJina:
    """Jina's service has no client of its own; its documentation gives these requests."""

    @pytest.mark.parametrize("documents", [LETTERS, [{"text": text} for text in LETTERS]])
    def test_rerank(self, models, ranked, documents):
        body = {"model": "ranker", "query": QUERY, "documents": documents, "top_n": 3}
        response = models.json("/v1/rerank", body | {"return_documents": True})
        for result, expected in zip(response["results"], ranked[:3], strict=True):
            assert result["index"] == expected["document"] - 1
            assert f32(result["relevance_score"]) == f32(expected["score"])
            assert result["document"] == {"text": expected["text"]}
        assert response["model"] == "ranker"
        assert response["usage"]["total_tokens"] > 0


class TestLiteLlm:
    """The bodies that LiteLLM 1.110.2 sends."""

    @pytest.mark.parametrize("top_n", [None, 2])
    @pytest.mark.parametrize("return_documents", [True, False])
    def test_rerank_of_the_provider_huggingface(self, models, ranked, top_n, return_documents):
        body = {"raw_scores": False, "truncation_direction": "Right", "query": QUERY}
        body |= {"top_n": top_n} if top_n else {}
        body |= {"texts": LETTERS, "return_text": return_documents}
        found = models.json("/rerank", body)
        for result, expected in zip(found, ranked[:top_n], strict=True):
            assert result["index"] == expected["document"] - 1
            assert f32(result["score"]) == f32(expected["score"])
            assert result.get("text") == (expected["text"] if return_documents else None)

    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
    def test_rerank_of_the_other_providers(self, models, ranked, path):
        # cohere: /v2/rerank; jina_ai and hosted_vllm: /v1/rerank.
        body = {"model": "ranker", "query": QUERY, "top_n": 2, "documents": LETTERS}
        found = models.json(path, body | {"return_documents": True})["results"]
        for result, expected in zip(found, ranked[:2], strict=True):
            assert result["index"] == expected["document"] - 1
            assert f32(result["relevance_score"]) == f32(expected["score"])

    def test_embeddings(self, server, vectors):
        body = {"inputs": TEXTS, "options": {"wait_for_model": True}, "truncate": True}
        assert_same_bits(server.json("/embed", body), vectors)
        found = server.json("/v1/embeddings", {"model": "m", "input": TEXTS})
        assert_same_bits([data["embedding"] for data in found["data"]], vectors)


class TestHaystack:
    """The bodies of huggingface-api-haystack 3.1.0 and jina-haystack 2.0.1. The latter's are those
    of LlamaIndex's (0.6.0) and LangChain's (langchain-community 0.4.1) rerankers for Jina, too."""

    @pytest.mark.parametrize("options", [{}, {"truncate": True, "truncation_direction": "Left"}])
    def test_rerank_of_tei(self, models, ranked, options):
        body = {"query": QUERY, "texts": LETTERS, "raw_scores": False}
        found = models.json("/rerank", body | options)
        assert [(element["index"], f32(element["score"])) for element in found] == [
            (row["document"] - 1, f32(row["score"])) for row in ranked
        ]

    @pytest.mark.parametrize("top_n", [None, 2])
    def test_rerank_of_jina(self, models, ranked, top_n):
        body = {"query": QUERY, "documents": LETTERS, "model": "ranker", "top_n": top_n}
        found = models.json("/v1/rerank", body)["results"]
        assert [(element["index"], f32(element["relevance_score"])) for element in found] == [
            (row["document"] - 1, f32(row["score"])) for row in ranked[:top_n]
        ]


class TestCommands:
    """The routes of the commands return the objects that the commands print."""

    def test_classify(self, models):
        expected = encodle("classify", "--model", MODELS["sequence"], *LETTERS)
        assert_same_json(models.json("/classify", {"inputs": LETTERS}), expected)
        assert_same_json(models.json("/classify", {"inputs": LETTERS[0]}), expected[:1])
        expected = encodle("classify", "--model", MODELS["ranker"], *LETTERS)
        assert_same_json(models.json("/classify", {"inputs": LETTERS, "model": "ranker"}), expected)

    @pytest.mark.parametrize("join", [None, "none", "simple", "first", "average", "max"])
    def test_tag(self, models, join):
        options = ["--aggregation", join] if join else []
        fields = {"aggregation": join} if join else {}
        expected = encodle("tag", "--model", MODELS["tagger"], *options, *LETTERS)
        assert_same_json(models.json("/tag", {"inputs": LETTERS} | fields), expected)

    @pytest.mark.parametrize("top", [None, 1, 3])
    def test_answer(self, models, top):
        options = ["--top", top] if top else []
        fields = {"top": top} if top else {}
        question = "a bad"
        expected = encodle(
            "answer", "--model", MODELS["answer"], "--question", question, *options, *LETTERS
        )
        found = models.json("/answer", {"inputs": LETTERS, "question": question} | fields)
        assert_same_json(found, expected)

    @pytest.mark.parametrize("top", [None, 1, 7])
    def test_fill_mask(self, models, top):
        options = ["--top", top] if top else []
        fields = {"top": top} if top else {}
        texts = ["a bad [MASK] cab", "[MASK] [MASK]"]
        expected = encodle("fill-mask", "--model", MODELS["masked_lm"], *options, *texts)
        assert_same_json(models.json("/fill_mask", {"inputs": texts} | fields), expected)

    @pytest.mark.parametrize("pair", [None, "A dog barks."])
    def test_attention(self, server, tmp_path, pair):
        file = tmp_path / "attention.json"
        options = ["--pair", pair] if pair else []
        command = [ENCODLE, "attention", TEXTS[0], *options, "--output", file]
        subprocess.run(command, check=True, cwd=ROOT)
        fields = {"pair": pair} if pair else {}
        found = server.json("/attention", {"inputs": TEXTS[0]} | fields)
        assert_same_json(found, json.loads(file.read_text()))

    @pytest.mark.parametrize("extension", ["svg", "html"])
    def test_attention_as_a_picture(self, server, tmp_path, extension):
        file = tmp_path / f"attention.{extension}"
        options = ["--layer", "1", "--head", "8", "--output", file]
        subprocess.run([ENCODLE, "attention", TEXTS[0], *options], check=True, cwd=ROOT)
        body = {"inputs": TEXTS[0], "layer": 1, "head": 8, "format": extension}
        response = server.post("/attention", body)
        assert response.status_code == 200
        kind = {"svg": "image/svg+xml", "html": "text/html"}[extension]
        assert response.headers["content-type"].startswith(kind)
        assert response.text.strip() == file.read_text().strip()

    def test_attention_of_every_model(self, models):
        for name in MODELS:
            found = models.json("/attention", {"inputs": "a b", "model": name})
            weights = np.array(found["weights"])
            t = len(found["tokens"])
            assert weights.ndim == 4 and weights.shape[2:] == (t, t), name  # layers, H, T, T
            assert np.abs(weights.sum(axis=-1) - 1).max() < 1e-5, name


def examples():
    """The commands of docs/server.md that call curl."""
    found = []
    text = (ROOT / "docs/server.md").read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.M):
            if "curl" in command:
                found.append(command)
    assert found, "docs/server.md has no examples with curl"
    return found


@pytest.mark.parametrize("command", examples(), ids=lambda command: shorten(command, 60))
def test_the_curl_examples_of_the_documentation(models, command):
    assert "localhost:8080" in command, f"an example does not use localhost:8080: {command}"
    command = command.replace("localhost:8080", f"{models.host}:{models.port}")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{command}\n{run.stderr}"
    assert run.stdout.strip(), f"no output: {command}"
    response = json.loads(run.stdout)
    assert not (isinstance(response, dict) and {"error", "message"} & response.keys()), (
        f"{command}\n{run.stdout}"
    )
