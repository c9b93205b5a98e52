"""Embedding with Daft, with the real package.

Tests with the marker `cluster` run Daft on a Ray cluster of three nodes on this machine, and kill
its processes with SIGKILL.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import encodle

daft = pytest.importorskip("daft")

from daft.functions import embed_text

import encodle.daft
from clusters import embed_here, vector_bytes, write_shards
from conftest import GOLDEN, MINILM
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

    def test_settings_dimensions_and_batch_size_apply(self, texts):
        provider = EncodleProvider(precision="int8", normalize_embeddings=True, threads=1)
        embedded = embed(texts, provider=provider, dimensions=64, batch_size=7)
        model = encodle.SentenceTransformer(precision="int8")
        expected = model.encode(texts, truncate_dim=64, normalize_embeddings=True)
        np.testing.assert_array_equal(np.array(embedded.to_pydict()["embedding"]), expected)

    def test_dimensions_beyond_those_of_the_model_are_an_error(self, texts):
        with pytest.raises(ValueError, match="dimensions is 385: expected at most 384"):
            embed(texts, provider="encodle", dimensions=385)
        with pytest.raises(ValueError, match="dimensions is 0: expected a positive integer"):
            embed(texts, provider="encodle", dimensions=0)

    def test_a_provider_attached_to_the_session_is_found_by_name(self, texts):
        with daft.session() as session:
            session.attach_provider(EncodleProvider(name="ours", precision="int8"))
            vectors = np.array(embed(texts[:3], provider="ours").to_pydict()["embedding"])
        expected = encodle.SentenceTransformer(precision="int8").encode(texts[:3])
        np.testing.assert_array_equal(vectors, expected)

    def test_the_model_can_be_a_folder(self, texts, tmp_path):
        with pytest.raises(encodle.EncodleError, match=tmp_path.name):
            embed(texts, provider="encodle", model=str(tmp_path))
        vectors = np.array(embed(texts[:2], provider="encodle", model=str(MINILM)).to_pydict()["embedding"])
        np.testing.assert_array_equal(vectors, encodle.SentenceTransformer().encode(texts[:2]))

    def test_the_path_of_a_model_is_absolute(self, monkeypatch):
        monkeypatch.chdir(MINILM.parent)
        descriptor = EncodleProvider().get_text_embedder(MINILM.name + "/.")
        assert descriptor.get_model() == str(MINILM)

    @pytest.mark.parametrize(
        ("name", "column_type"),
        [
            (
                "sparse/splade_max",
                daft.DataType.list(
                    daft.DataType.struct(
                        {"index": daft.DataType.uint32(), "value": daft.DataType.float32()}
                    )
                ),
            ),
            ("multi_vector/expansion", daft.DataType.list(daft.DataType.list(daft.DataType.float32()))),
        ],
    )
    def test_sparse_and_multi_vector_models_have_columns_of_lists(self, texts, name, column_type):
        model = str(GOLDEN / name)
        provider = EncodleProvider(prompt_name="query", skip_invalid=True)
        embedded = embed([*texts, None], provider=provider, model=model, batch_size=7)
        assert embedded.schema()["embedding"].dtype == column_type
        here = encodle.BatchEmbedder(model, prompt_name="query")(pa.table({"text": texts}))
        assert embedded.to_pydict()["embedding"] == [*here["embedding"].to_pylist(), None]
        with pytest.raises(ValueError, match="dimensions has no meaning for a (sparse|multi) model"):
            embed(texts, provider="encodle", model=model, dimensions=3)

    def test_a_setting_without_meaning_for_a_sparse_model_is_an_error(self, texts):
        provider = EncodleProvider(normalize_embeddings=True)
        with pytest.raises(ValueError, match="normalize_embeddings and truncate_dim have no meaning"):
            embed(texts, provider=provider, model=str(GOLDEN / "sparse/splade_max"))

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
        with pytest.raises(TypeError, match="batch_size"):
            EncodleProvider(batch_size=3)
        with pytest.raises(ValueError, match="precision 'fp16' is unknown"):
            EncodleProvider(precision="fp16")
        with pytest.raises(TypeError, match="no argument model"):
            EncodleProvider(model="x")


SCRIPT = """
import os
import sys
from pathlib import Path

import daft
import ray
from clusters import When, descendants, command, kill
from daft.functions import embed_text
from ray.cluster_utils import Cluster

import encodle.daft

inputs, outputs, victim = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
daft.set_runner_ray(cluster.address)


def written():
    return len(os.listdir(outputs)) if os.path.isdir(outputs) else 0


def kill_processes():
    raylet = nodes[0].all_processes["raylet"][0].process.pid
    pids = [raylet, *descendants(raylet)]
    if victim == "worker":
        pids = [pid for pid in pids if command(pid).startswith("ray::") and "Agent" not in command(pid)]
    count = written()
    kill(pids)
    return count, pids


with When(lambda: written() >= 2, kill_processes) as action:
    texts = daft.read_parquet(inputs + "/*.parquet")
    texts = texts.with_column("embedding", embed_text(daft.col("text"), provider="encodle"))
    paths = texts.write_parquet(outputs).to_pydict()["path"]
print(f"{victim}: files written and processes killed: {action.result}; {len(paths)} files at the end")
assert action.result[1] and action.result[0] < len(paths)
# Pass the paths to the test: a killed worker leaves an incomplete file in the folder.
Path(outputs + ".txt").write_text("\\n".join(paths))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
@pytest.mark.parametrize("victim", ["worker", "node"])
def test_killed_processes_of_the_ray_runner_lose_no_rows(tmp_path, victim):
    """Runs in a separate process, because Daft's runner can be set only once per process."""
    pytest.importorskip("ray")
    inputs, outputs = write_shards(tmp_path / "in", 16, 150), tmp_path / "out"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(inputs), str(outputs), victim],
        cwd=Path(__file__).parent,
        check=True,
        timeout=300,
    )
    expected = vector_bytes(embed_here(pq.read_table(inputs)))
    paths = (tmp_path / "out.txt").read_text().splitlines()
    assert vector_bytes(pa.concat_tables(map(pq.read_table, paths))) == expected
