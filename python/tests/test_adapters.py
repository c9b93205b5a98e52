"""The adapters for LangChain, LlamaIndex, Haystack and mteb, with the real packages.

Each class is skipped if its package is not installed.
"""

import asyncio
import threading

import numpy as np
import pytest

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
