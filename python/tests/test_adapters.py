"""The adapters for LangChain, LlamaIndex, Haystack and mteb, with the real packages.

Each class is skipped if its package is not installed.
"""

import asyncio
import threading

import numpy as np
import pytest
from conftest import GOLDEN

import encodle

TEXTS = ["A man is eating food.", "A man eats.", "It snows."]
PROMPTS = {"query": "query: ", "document": "passage: "}


@pytest.fixture(scope="module")
def embeddings():
    pytest.importorskip("langchain_core")
    from encodle.langchain import EncodleEmbeddings

    return EncodleEmbeddings


@pytest.fixture(scope="module")
def embedding():
    pytest.importorskip("llama_index.core")
    from encodle.llama_index import EncodleEmbedding

    return EncodleEmbedding


@pytest.fixture(scope="module")
def encodle_haystack():
    pytest.importorskip("haystack")
    import encodle.haystack

    return encodle.haystack


@pytest.fixture(scope="module")
def adapter():
    pytest.importorskip("mteb")
    from encodle.mteb import EncodleEncoder

    return EncodleEncoder(prompts=PROMPTS)


#: A cross-encoder with one label.
SCORE = str(GOLDEN / "heads/score")


@pytest.fixture(scope="module")
def ranked():
    """The texts in descending order of their score for the query "bad cab", with the scores."""
    hits = encodle.CrossEncoder(SCORE).rank("bad cab", TEXTS)
    assert [hit["corpus_id"] for hit in hits] != [0, 1, 2]
    return [(TEXTS[hit["corpus_id"]], hit["score"]) for hit in hits]


class TestLangChain:
    def test_vectors_equal_those_of_encode(self, embeddings, model):
        adapter = embeddings(model)
        assert adapter.embed_documents(TEXTS) == model.encode(TEXTS).tolist()
        assert adapter.embed_query(TEXTS[0]) == model.encode(TEXTS[0]).tolist()
        assert asyncio.run(adapter.aembed_query(TEXTS[0])) == adapter.embed_query(TEXTS[0])

    def test_queries_and_documents_have_their_prompts(self, embeddings, model):
        adapter = embeddings(prompts=PROMPTS)
        assert adapter.embed_documents(TEXTS) == model.encode(TEXTS, prompt="passage: ").tolist()
        assert adapter.embed_query(TEXTS[0]) == model.encode(TEXTS[0], prompt="query: ").tolist()

    def test_a_vector_store_finds_the_nearest_text(self, embeddings, model):
        from langchain_core.vectorstores import InMemoryVectorStore

        store = InMemoryVectorStore.from_texts(TEXTS, embeddings(model))
        (found, score), *_ = store.similarity_search_with_score("A man is eating a piece of bread.", k=1)
        assert found.page_content == TEXTS[0]
        assert score == pytest.approx(0.755317, abs=1e-5)

    def test_unknown_arguments_are_errors(self, embeddings, model):
        with pytest.raises(TypeError):
            embeddings(bogus={})
        with pytest.raises(TypeError, match="precision"):
            embeddings(model, precision="int8")

    def test_the_reranker_sorts_documents_by_their_scores(self, embeddings, ranked):
        from langchain_core.documents import Document

        from encodle.langchain import EncodleReranker

        documents = [Document(text, metadata={"id": i}) for i, text in enumerate(TEXTS)]
        for reranker in (EncodleReranker(SCORE, threads=1), EncodleReranker(encodle.CrossEncoder(SCORE))):
            found = reranker.compress_documents(documents, "bad cab")
            assert [(d.page_content, d.metadata["relevance_score"]) for d in found] == ranked
            assert [d.metadata["id"] for d in found] == [TEXTS.index(text) for text, _ in ranked]
            assert asyncio.run(reranker.acompress_documents(documents, "bad cab")) == found
        assert documents[0].metadata == {"id": 0}
        best = EncodleReranker(SCORE, top_n=1).compress_documents(documents, "bad cab")
        assert best == found[:1] and reranker.compress_documents([], "bad cab") == []
        with pytest.raises(TypeError, match="precision"):
            EncodleReranker(encodle.CrossEncoder(SCORE), precision="int8")


class TestLlamaIndex:
    def test_vectors_equal_those_of_encode(self, embedding, model):
        adapter = embedding(embed_batch_size=2)
        assert adapter.get_text_embedding_batch(TEXTS) == model.encode(TEXTS).tolist()
        assert adapter.get_text_embedding(TEXTS[1]) == model.encode(TEXTS[1]).tolist()
        assert adapter.get_query_embedding(TEXTS[0]) == model.encode(TEXTS[0]).tolist()
        assert asyncio.run(adapter.aget_text_embedding_batch(TEXTS)) == model.encode(TEXTS).tolist()

    def test_queries_and_nodes_have_their_prompts(self, embedding, model):
        adapter = embedding(settings={"prompts": PROMPTS})
        assert adapter.get_text_embedding(TEXTS[0]) == model.encode(TEXTS[0], prompt="passage: ").tolist()
        assert adapter.get_query_embedding(TEXTS[0]) == model.encode(TEXTS[0], prompt="query: ").tolist()

    def test_an_adapter_is_the_same_after_serialization(self, embedding):
        adapter = embedding(normalize=True, settings={"threads": 1})
        restored = type(adapter).model_validate(adapter.model_dump())
        assert restored.model_dump() == adapter.model_dump()

    def test_an_index_finds_the_nearest_node(self, embedding):
        from llama_index.core import VectorStoreIndex
        from llama_index.core.schema import TextNode

        index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=embedding())
        (found,) = index.as_retriever(similarity_top_k=1).retrieve("A man is eating a piece of bread.")
        assert found.text == TEXTS[0]
        assert found.score == pytest.approx(0.755317, abs=1e-5)

    def test_unknown_arguments_are_errors(self, embedding):
        with pytest.raises(TypeError, match="precision"):
            embedding(precision="int8")

    def test_the_reranker_sorts_nodes_by_their_scores(self, embedding, ranked):
        from llama_index.core.schema import NodeWithScore, TextNode

        from encodle.llama_index import EncodleRerank

        nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in TEXTS]
        reranker = EncodleRerank(SCORE, top_n=3, settings={"threads": 1})
        found = reranker.postprocess_nodes(nodes, query_str="bad cab")
        assert [(node.text, node.score) for node in found] == ranked and nodes[0].score == 0.5
        restored = EncodleRerank.model_validate(reranker.model_dump())
        assert asyncio.run(restored.apostprocess_nodes(nodes, query_str="bad cab")) == found
        assert EncodleRerank(SCORE).postprocess_nodes(nodes, query_str="bad cab") == found[:2]
        with pytest.raises(ValueError, match="query is missing"):
            reranker.postprocess_nodes(nodes)
        with pytest.raises(TypeError, match="precision"):
            EncodleRerank(SCORE, precision="int8")


class TestHaystack:
    def test_a_query_has_the_vector_of_encode(self, encodle_haystack, model):
        adapter = encodle_haystack.EncodleTextEmbedder(prefix="<", suffix=">", settings={"prompts": PROMPTS})
        assert adapter.run(TEXTS[0])["embedding"] == model.encode(f"query: <{TEXTS[0]}>").tolist()
        with pytest.raises(TypeError, match="EncodleDocumentEmbedder"):
            adapter.run(TEXTS)

    def test_documents_have_the_vectors_of_their_fields_and_content(self, encodle_haystack, model):
        from haystack import Document

        adapter = encodle_haystack.EncodleDocumentEmbedder(meta_fields_to_embed=["title"])
        documents = [Document(content=TEXTS[0], meta={"title": "Food"}), Document(content=TEXTS[1])]
        embedded = adapter.run(documents)["documents"]
        assert [document.content for document in embedded] == TEXTS[:2]
        assert [document.embedding for document in embedded] == model.encode(
            [f"Food\n{TEXTS[0]}", TEXTS[1]]
        ).tolist()
        assert documents[0].embedding is None
        assert adapter.run([]) == {"documents": []}
        title_only = adapter.run([Document(content=None, meta={"title": "Food"})])["documents"][0]
        assert title_only.embedding == model.encode("Food\n").tolist()
        with pytest.raises(TypeError, match="EncodleTextEmbedder"):
            adapter.run("text")
        with pytest.raises(TypeError, match=r"documents\[1\] is a str: expected a Document"):
            adapter.run([documents[0], "text"])

    def test_a_pipeline_is_the_same_after_serialization(self, encodle_haystack, model):
        from haystack import Document, Pipeline

        pipeline = Pipeline()
        settings = {"precision": "int8"}
        pipeline.add_component("query", encodle_haystack.EncodleTextEmbedder(settings=settings))
        pipeline.add_component(
            "documents", encodle_haystack.EncodleDocumentEmbedder(normalize_embeddings=True, settings=settings)
        )
        copy = Pipeline.loads(pipeline.dumps(), allowed_modules=["encodle.haystack"])
        assert copy.get_component("documents").normalize_embeddings
        inputs = {"query": {"text": TEXTS[0]}, "documents": {"documents": [Document(content=TEXTS[1])]}}
        assert pipeline.run(inputs) == copy.run(inputs)

    def test_the_ranker_sorts_documents_by_their_scores(self, encodle_haystack, ranked):
        from haystack import Document, Pipeline

        documents = [Document(content=text) for text in TEXTS]
        pipeline = Pipeline()
        pipeline.add_component("ranker", encodle_haystack.EncodleRanker(SCORE, settings={"threads": 1}))
        inputs = {"ranker": {"query": "bad cab", "documents": documents}}
        for copy in (pipeline, Pipeline.loads(pipeline.dumps(), allowed_modules=["encodle.haystack"])):
            found = copy.run(inputs)["ranker"]["documents"]
            assert [(document.content, document.score) for document in found] == ranked
        assert documents[0].score is None
        ranker = encodle_haystack.EncodleRanker(SCORE, top_k=1, meta_fields_to_embed=["title"])
        assert ranker.run("bad cab", documents)["documents"] == found[:1]
        assert ranker.run("bad cab", documents, top_k=2)["documents"] == found[:2]
        titled = ranker.run("bad cab", [Document(content="cab", meta={"title": "a"})])["documents"][0]
        assert titled.score == encodle.CrossEncoder(SCORE).predict(("bad cab", "a\ncab"))
        with pytest.raises(TypeError, match="documents is a str: expected a list of Document"):
            ranker.run("bad cab", "text")
        with pytest.raises(TypeError, match="query is None: expected str"):
            ranker.run(None, documents)

    def test_the_event_loop_runs_while_a_model_is_opened(self, encodle_haystack, monkeypatch):
        loop_ran = threading.Event()

        class Slow:
            def __init__(self, *_, **__):
                assert loop_ran.wait(10)

        monkeypatch.setattr(encodle_haystack, "SentenceTransformer", Slow)
        adapter = encodle_haystack.EncodleTextEmbedder()

        async def run():
            task = asyncio.create_task(adapter.warm_up_async())
            await asyncio.sleep(0.1)
            loop_ran.set()
            await task

        asyncio.run(run())
        assert isinstance(adapter._opened, Slow)


class TestMteb:
    def test_the_protocol_is_implemented(self, adapter):
        from mteb.models import EncoderProtocol

        assert isinstance(adapter, EncoderProtocol)
        assert adapter.mteb_model_meta.name == "encodle/all-MiniLM-L6-v2"
        assert adapter.mteb_model_meta.embed_dim == 384

    def test_a_task_gives_the_scores_of_the_vectors(self, adapter, model):
        import mteb
        from datasets import Dataset, DatasetDict
        from scipy.stats import spearmanr

        task = mteb.get_task("STS12")
        left = [*TEXTS, "The sun shines."]
        right = ["A man is eating a piece of bread.", "It rains.", "Snow falls.", "A man eats."]
        gold = [4.0, 0.5, 4.5, 1.0]
        data = {"sentence1": left, "sentence2": right, "score": gold}
        task.dataset = DatasetDict({"test": Dataset.from_dict(data)})
        task.data_loaded = True
        scores = task.evaluate(adapter, split="test", encode_kwargs={"batch_size": 2})
        cosines = model.similarity_pairwise(model.encode(left), model.encode(right))
        expected = spearmanr(gold, cosines).statistic
        assert scores["default"]["cosine_spearman"] == pytest.approx(expected, abs=1e-6)

    def test_queries_and_documents_have_their_prompts(self, adapter, model):
        import mteb
        from mteb.types import PromptType

        metadata = mteb.get_task("STS12").metadata
        for prompt_type, prompt in [
            (PromptType.query, "query: "),
            (PromptType.document, "passage: "),
            (None, ""),
        ]:
            vectors = adapter.encode(
                [{"text": TEXTS[:2]}, {"text": TEXTS[2:]}],
                task_metadata=metadata,
                hf_split="test",
                hf_subset="default",
                prompt_type=prompt_type,
            )
            np.testing.assert_array_equal(vectors, model.encode(TEXTS, prompt=prompt))

    def test_a_cross_encoder_gives_the_scores_of_its_pairs(self, adapter):
        import mteb
        from mteb.models import CrossEncoderProtocol

        from encodle.mteb import EncodleCrossEncoder

        ranker = EncodleCrossEncoder(SCORE, threads=1, token="secret")
        assert isinstance(ranker, CrossEncoderProtocol)
        assert ranker.mteb_model_meta.experiment_kwargs == {"threads": 1}
        assert ranker.mteb_model_meta.model_type == ["cross-encoder"]
        queries = ["bad cab", "a", "b"]
        scores = ranker.predict(
            [{"text": queries[:2]}, {"text": queries[2:]}],
            [{"text": TEXTS[:1]}, {"text": TEXTS[1:]}],
            task_metadata=mteb.get_task("AskUbuntuDupQuestions").metadata,
            hf_split="test",
            hf_subset="default",
            batch_size=2,
        )
        expected = encodle.CrossEncoder(SCORE).predict(list(zip(queries, TEXTS)))
        np.testing.assert_array_equal(scores, expected)
