"""Embedding with Daft, with the real package.

The test with the marker `cluster` runs Daft on a Ray cluster of three nodes on this machine.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest

import encodle

daft = pytest.importorskip("daft")

from daft.functions import embed_text

import encodle.daft
from clusters import embed_here, vector_bytes, write_shards
from encodle.daft import EncodleProvider


@pytest.fixture(scope="module")
def texts():
    return [f"text number {row}" for row in range(100)]


def embed(texts, **arguments):
    dataframe = daft.from_pydict({"text": texts})
    return dataframe.with_column("embedding", embed_text(daft.col("text"), **arguments))


class TestProvider:
    def test_the_provider_is_known_by_name(self, texts):
        embedded = embed(texts, provider="encodle")
        assert embedded.schema()["embedding"].dtype == daft.DataType.embedding(daft.DataType.float32(), 384)
        vectors = np.array(embedded.to_pydict()["embedding"])
        np.testing.assert_array_equal(vectors, encodle.SentenceTransformer().encode(texts))

    def test_settings_dimensions_and_batch_size(self, texts):
        provider = EncodleProvider(precision="int8", normalize_embeddings=True, threads=1)
        embedded = embed(texts, provider=provider, dimensions=64, batch_size=7)
        model = encodle.SentenceTransformer(precision="int8")
        expected = model.encode(texts, truncate_dim=64, normalize_embeddings=True)
        np.testing.assert_array_equal(np.array(embedded.to_pydict()["embedding"]), expected)

    def test_a_provider_of_the_session(self, texts):
        with daft.session() as session:
            session.attach_provider(EncodleProvider(name="ours", precision="int8"))
            vectors = np.array(embed(texts[:3], provider="ours").to_pydict()["embedding"])
        expected = encodle.SentenceTransformer(precision="int8").encode(texts[:3])
        np.testing.assert_array_equal(vectors, expected)

    def test_a_model_in_a_folder(self, texts, tmp_path):
        with pytest.raises(encodle.EncodleError):
            embed(texts, provider="encodle", model=str(tmp_path))

    def test_a_null_text_fails_with_its_row(self):
        with pytest.raises(encodle.EncodleError, match="row 1 of a batch, column 'text': .*null"):
            embed(["a", None, "b"], provider="encodle").collect()

    def test_skip_invalid_gives_null(self):
        vectors = embed(["a", None, "b"], provider=EncodleProvider(skip_invalid=True)).to_pydict()[
            "embedding"
        ]
        assert [vector is None for vector in vectors] == [False, True, False]

    def test_wrong_arguments_are_errors(self, texts):
        with pytest.raises(TypeError, match=r"\['precision'\]"):
            embed(texts, provider="encodle", precision="int8")
        with pytest.raises(TypeError, match="pooling"):
            EncodleProvider(pooling="mean")
        with pytest.raises(TypeError, match="no argument model"):
            EncodleProvider(model="x")


SCRIPT = """
import sys
import daft, ray
import encodle.daft
from daft.functions import embed_text
from ray.cluster_utils import Cluster

inputs, outputs = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)
daft.set_runner_ray(cluster.address)
texts = daft.read_parquet(inputs + "/*.parquet")
texts.with_column("embedding", embed_text(daft.col("text"), provider="encodle")).write_parquet(outputs)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
def test_ray_runner_gives_the_bytes_of_one_process(tmp_path):
    """In a process of its own, because Daft's runner cannot be changed."""
    import subprocess
    import sys

    pytest.importorskip("ray")
    inputs = write_shards(tmp_path / "in", 6, 50)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(inputs), str(tmp_path / "out")], check=True, timeout=300
    )
    expected = vector_bytes(embed_here(pq.read_table(inputs)))
    assert vector_bytes(pq.read_table(tmp_path / "out")) == expected
