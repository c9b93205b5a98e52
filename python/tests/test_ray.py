"""Embedding on Ray, with the real package.

Tests with the marker `cluster` start a cluster of three nodes on this machine and kill its
processes with SIGKILL.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import MINILM
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from safetensors.numpy import load_file, save_file

import encodle
from encodle import EncodleError

pytest.importorskip("ray")
pytest.importorskip("ray.data")

import ray

from clusters import When, descendants, command, embed_here, kill, vector_bytes, wait_for, write_shards
import encodle.ray
from encodle.ray import Embedder, Summary, embed_parquet


@pytest.fixture(scope="module")
def local():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three files of 40 rows."""
    return write_shards(tmp_path_factory.mktemp("ray") / "texts", 3, 40)


def names(folder):
    return sorted(os.listdir(folder))


def assert_same_files(inputs, outputs, **settings):
    """Each output file equals the table that one process computes from the input file."""
    assert names(inputs) == names(outputs)
    for name in names(inputs):
        expected = embed_here(pq.read_table(inputs / name), **settings)
        written = pq.read_table(outputs / name)
        assert written.schema.equals(expected.schema)
        assert written.column("text") == expected.column("text")
        assert vector_bytes(written) == vector_bytes(expected)


class TestEmbedder:
    def test_map_batches_gives_the_bytes_of_one_process(self, local, shards):
        dataset = ray.data.read_parquet(str(shards)).map_batches(
            Embedder,
            fn_constructor_kwargs={"precision": "int8"},
            batch_format="pyarrow",
            batch_size=25,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        table = pa.concat_tables(ray.get(dataset.to_arrow_refs()))
        expected = embed_here(pq.read_table(shards), precision="int8")
        assert vector_bytes(table) == vector_bytes(expected)

    def test_threads_are_the_cpus_of_the_actor(self, local):
        @ray.remote
        class Actor:
            def threads(self, **settings):
                return Embedder(**settings)._embed.threads

        for num_cpus, expected in [(2, 2), (1, 1), (0.5, 1), (0, 1)]:
            actor = Actor.options(num_cpus=num_cpus).remote()
            assert ray.get(actor.threads.remote()) == expected
        assert ray.get(actor.threads.remote(threads=3)) == 3

    def test_a_batch_of_another_format_is_an_error(self):
        with pytest.raises(TypeError, match='batch is of type dict: .*; pass batch_format="pyarrow"'):
            Embedder(threads=1)({"text": ["a"]})

    def test_the_constructor_fails_for_a_wrong_model(self):
        with pytest.raises(encodle.EncodleError):
            Embedder("/no/such/model", threads=1)


class TestEmbedParquet:
    def test_files_equal_those_of_one_process(self, local, shards, tmp_path):
        summary = embed_parquet(str(shards), str(tmp_path), precision="int8")
        assert summary == Summary(written=names(shards), present=[], rows=120, skipped=[])
        assert_same_files(shards, tmp_path, precision="int8")

    def test_vectors_equal_those_of_the_command(self, program, local, shards, tmp_path):
        embed_parquet(str(shards), str(tmp_path / "ray"))
        for name in names(shards):
            command = [program, "embed", "--quiet", "--input", shards / name, "--output", tmp_path / name]
            subprocess.run(command, check=True, timeout=60)
            by_ray, by_command = pq.read_table(tmp_path / "ray" / name), pq.read_table(tmp_path / name)
            assert vector_bytes(by_ray) == vector_bytes(by_command)

    def test_a_second_run_writes_only_missing_files(self, local, shards, tmp_path):
        embed_parquet([str(shards / "part-000.parquet")], str(tmp_path))
        before = (tmp_path / "part-000.parquet").stat()
        (tmp_path / ".part-001.parquet.0f.partial").write_bytes(b"left by a killed worker")
        summary = embed_parquet(str(shards), f"file://{tmp_path}")
        assert summary.written == ["part-001.parquet", "part-002.parquet"]
        assert summary.present == ["part-000.parquet"]
        assert (tmp_path / "part-000.parquet").stat().st_mtime_ns == before.st_mtime_ns
        assert_same_files(shards, tmp_path)
        assert embed_parquet(str(shards), str(tmp_path)).written == []
        # Default values and the number of threads do not change the settings.
        assert embed_parquet(str(shards), str(tmp_path), precision="f32", threads=1).written == []
        assert embed_parquet(str(shards), str(tmp_path), model="all-MiniLM-L6-v2").written == []
        with pytest.raises(ValueError, match="was embedded with other settings"):
            embed_parquet(str(shards), str(tmp_path), precision="int8")

    def test_outputs_of_other_weights_and_versions_are_refused(self, local, shards, tmp_path, monkeypatch):
        folder = shutil.copytree(MINILM, tmp_path / "model")
        arguments = {"inputs": shards, "outputs": tmp_path / "out", "model": folder}
        assert len(embed_parquet(**arguments).written) == 3
        metadata = pq.read_schema(tmp_path / "out/part-000.parquet").metadata
        settings = json.loads(metadata[b"encodle.settings"])
        assert settings["version"] == version("encodle") and len(settings["test_vector"]) == 16
        assert embed_parquet(**arguments).written == []
        with monkeypatch.context() as patched:
            patched.setattr(encodle.ray, "version", lambda _: "0.0.0")
            with pytest.raises(ValueError, match="was embedded with other settings"):
                embed_parquet(**arguments)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("layer.5.output.dense.weight"))
        save_file({**weights, name: np.flip(weights[name], 0).copy()}, folder / "model.safetensors")
        monkeypatch.setattr(encodle.batch, "_models", {})
        with pytest.raises(ValueError, match="was embedded with other settings"):
            embed_parquet(**arguments)
        # A driver that cannot open the model compares the other settings.
        shutil.rmtree(folder)
        folder.mkdir()
        monkeypatch.setattr(encodle.batch, "_models", {})
        assert embed_parquet(**arguments).written == []

    def test_outputs_of_other_runs_and_programs_are_refused(self, local, shards, tmp_path):
        embed_parquet([str(shards / "part-000.parquet")], str(tmp_path))
        inputs = [str(shards / "part-001.parquet")]
        with pytest.raises(ValueError, match="part-000.parquet was embedded with other settings"):
            embed_parquet(inputs, str(tmp_path), prompt="query: ")
        other = tmp_path / "part-001.parquet"
        pq.write_table(pa.table({"x": [1]}), other)
        with pytest.raises(ValueError, match="part-001.parquet exists and is not an output of"):
            embed_parquet(inputs, str(tmp_path))
        other.write_bytes(b"text")
        with pytest.raises(ValueError, match="part-001.parquet is not a Parquet file"):
            embed_parquet(inputs, str(tmp_path))

    def test_outputs_without_the_extension_parquet_are_checked_too(self, local, shards, tmp_path):
        texts = tmp_path / "texts.pq"
        texts.write_bytes((shards / "part-000.parquet").read_bytes())
        outputs = tmp_path / "out"
        embed_parquet([str(texts)], str(outputs))
        with pytest.raises(ValueError, match="texts.pq was embedded with other settings"):
            embed_parquet([str(texts)], str(outputs), prompt="query: ")
        (outputs / "texts.pq").unlink()
        (outputs / "texts.pq").mkdir()
        with pytest.raises(ValueError, match="texts.pq is not a file"):
            embed_parquet([str(texts)], str(outputs))

    def test_an_unknown_id_column_is_an_error(self, local, shards, tmp_path):
        with pytest.raises(EncodleError, match="column 'nope' not found in .*part-000.parquet: expected"):
            embed_parquet(str(shards), str(tmp_path), id_column="nope")

    def test_inputs_are_a_list_of_uris_or_of_relative_paths(self, local, shards, tmp_path, monkeypatch):
        monkeypatch.chdir(shards.parent)
        relative = [f"{shards.name}/part-000.parquet", f"{shards.name}/part-001.parquet"]
        assert len(embed_parquet(relative, str(tmp_path / "a")).written) == 2
        uris = [f"file://{shards}/part-000.parquet", f"file://{shards}/part-001.parquet"]
        assert len(embed_parquet(uris, str(tmp_path / "b")).written) == 2

    def test_the_schema_of_spark_is_not_copied(self, local, tmp_path):
        inputs = tmp_path / "in"
        inputs.mkdir()
        metadata = {"org.apache.spark.sql.parquet.row.metadata": "{}", "owner": "me"}
        table = pa.table({"id": [0], "text": ["I love AI"]}).replace_schema_metadata(metadata)
        pq.write_table(table, inputs / "a.parquet")
        embed_parquet(str(inputs), str(tmp_path / "out"))
        metadata = pq.read_schema(tmp_path / "out" / "a.parquet").metadata
        assert set(metadata) == {b"owner", b"encodle.settings"} and metadata[b"owner"] == b"me"

    def test_a_null_text_fails_with_file_and_row(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 3, 10, null_rows=(17,))
        with pytest.raises(encodle.EncodleError, match=r"in/part-001\.parquet, row 7, column 'text': .*null"):
            embed_parquet(str(inputs), str(tmp_path / "out"))
        assert "part-001.parquet" not in names(tmp_path / "out")

    def test_skip_lists_files_and_rows(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 3, 10, null_rows=(17, 19, 20))
        summary = embed_parquet(str(inputs), str(tmp_path / "out"), on_error="skip", batch_size=4)
        assert summary.rows == 27
        assert summary.skipped == [
            (str(inputs / "part-001.parquet"), 7),
            (str(inputs / "part-001.parquet"), 9),
            (str(inputs / "part-002.parquet"), 0),
        ]
        assert pq.read_table(tmp_path / "out" / "part-001.parquet").column("id").to_pylist() == [
            10, 11, 12, 13, 14, 15, 16, 18
        ]  # fmt: skip

    def test_ids_of_written_rows_are_kept_in_a_checkpoint(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 2, 20)
        outputs = str(tmp_path / "out")
        first = embed_parquet(str(inputs / "part-000.parquet"), outputs, id_column="id")
        assert first.rows == 20
        second = embed_parquet(str(inputs), outputs, id_column="id")
        assert (second.rows, second.present) == (20, first.written)
        expected = embed_here(pq.read_table(inputs))
        assert vector_bytes(pq.read_table(outputs)) == vector_bytes(expected)

    def test_the_checkpoint_is_in_the_given_file_system(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 1, 10)
        files = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
        arguments = {"id_column": "id", "checkpoint": "written", "filesystem": files}
        assert embed_parquet("in", "out", **arguments).rows == 10
        assert names(tmp_path) == ["in", "out", "written"] and names(inputs) == ["part-000.parquet"]
        assert embed_parquet("in", "out", **arguments).rows == 0

    def test_a_null_text_fails_with_its_id(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 1, 10, null_rows=(7,))
        with pytest.raises(encodle.EncodleError, match="^id 7, column 'text': .*null"):
            embed_parquet(str(inputs), str(tmp_path / "out"), id_column="id")

    def test_a_file_that_cannot_be_embedded_is_named(self, local, tmp_path):
        inputs = write_shards(tmp_path / "in", 2, 2)
        broken = inputs / "part-001.parquet"
        whole = broken.read_bytes()
        other_column = pa.BufferOutputStream()
        pq.write_table(pa.table({"body": ["a"]}), other_column)
        cases = [(whole[:-20], ".*Parquet"), (other_column.getvalue(), "column 'text' not found")]
        for content, message in cases:
            broken.write_bytes(content)
            with pytest.raises(EncodleError, match=f"^{broken}: {message}"):
                embed_parquet(inputs, tmp_path / "out")

    def test_a_null_id_is_an_error(self, local, tmp_path):
        texts = tmp_path / "in.parquet"
        pq.write_table(pa.table({"id": [None, 5, None], "text": ["a", "b", "c"]}), texts)
        with pytest.raises(EncodleError, match="^column 'id' has 2 nulls in a batch of 3 rows: expected an id"):
            embed_parquet(texts, tmp_path / "out", id_column="id")

    def test_wrong_arguments_are_errors(self, shards, tmp_path):
        with pytest.raises(TypeError, match="batch_sizes"):
            embed_parquet(str(shards), str(tmp_path), batch_sizes=3)
        with pytest.raises(ValueError, match="contains input files"):
            embed_parquet(str(shards), str(shards))
        with pytest.raises(FileNotFoundError, match="has no file"):
            embed_parquet(str(tmp_path), str(tmp_path / "out"))
        with pytest.raises(FileNotFoundError, match="does not exist"):
            embed_parquet(str(tmp_path / "no"), str(tmp_path / "out"))
        other = write_shards(tmp_path / "other", 1, 1)
        with pytest.raises(ValueError, match="have the same name"):
            embed_parquet([str(shards), str(other)], str(tmp_path / "out"))
        with pytest.raises(ValueError, match="num_cpus is 0"):
            embed_parquet(str(shards), str(tmp_path / "out"), num_cpus=0)
        with pytest.raises(ValueError, match="checkpoint applies only with id_column"):
            embed_parquet(str(shards), str(tmp_path / "out"), checkpoint="x")


@pytest.fixture
def cluster():
    """Three nodes: the driver's node without CPUs, and two nodes with 2 CPUs each."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "resources": {"head": 1}, "include_dashboard": False},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


def workers(node):
    """The processes that embed on a node."""
    return [pid for pid in descendants(raylet(node)) if command(pid).startswith("ray::MapWorker")]


@pytest.mark.cluster
class TestKilledProcesses:
    SHARDS, ROWS = 16, 150

    def embed(self, tmp_path, kill_processes):
        """Embed shards; call `kill_processes` when two output files exist. Check the files."""
        inputs, outputs = write_shards(tmp_path / "in", self.SHARDS, self.ROWS), tmp_path / "out"
        outputs.mkdir()

        def done():
            return [name for name in os.listdir(outputs) if not name.startswith(".")]

        def act():
            return len(done()), kill_processes()

        with When(lambda: len(done()) >= 2, act) as action:
            summary = embed_parquet(str(inputs), str(outputs))
        files, killed = action.result
        print(f"{files} of {self.SHARDS} files were written when processes {killed} were killed; {summary}")
        assert 2 <= files < self.SHARDS and killed
        assert summary.written == names(inputs)
        assert summary.rows == self.SHARDS * self.ROWS
        assert_same_files(inputs, outputs)

    def test_a_killed_worker_loses_no_rows(self, cluster, tmp_path):
        def kill_worker():
            pids = wait_for(lambda: workers(sorted(cluster.worker_nodes, key=raylet)[0]))[:1]
            kill(pids)
            return pids

        self.embed(tmp_path, kill_worker)

    def test_a_killed_node_loses_no_rows(self, cluster, tmp_path):
        def kill_node():
            node = sorted(cluster.worker_nodes, key=raylet)[0]
            pids = [raylet(node), *descendants(raylet(node))]
            kill(pids)
            return pids

        self.embed(tmp_path, kill_node)

    def test_a_worker_killed_for_lack_of_memory_is_started_again(self, cluster, tmp_path):
        inputs = write_shards(tmp_path / "in", 4, 40)
        marker = str(tmp_path / "killed")

        class OutOfMemory(Embedder):
            """Kills itself once with SIGKILL, as the kernel's out-of-memory killer would."""

            def __call__(self, batch):
                if not os.path.exists(marker):
                    open(marker, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().__call__(batch)

        dataset = ray.data.read_parquet(str(inputs)).map_batches(
            OutOfMemory,
            batch_format="pyarrow",
            batch_size=10,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        table = pa.concat_tables(ray.get(dataset.to_arrow_refs()))
        assert os.path.exists(marker)
        assert vector_bytes(table) == vector_bytes(embed_here(pq.read_table(inputs)))

    def test_a_run_after_a_killed_driver_embeds_only_the_missing_rows(self, cluster, tmp_path):
        inputs, outputs = write_shards(tmp_path / "in", self.SHARDS, self.ROWS), tmp_path / "out"
        outputs.mkdir()
        script = (
            "import ray; from encodle.ray import embed_parquet\n"
            f"ray.init(address={cluster.address!r})\n"
            "ray.data.DataContext.get_current().target_max_block_size = 200_000\n"
            f"embed_parquet({str(inputs)!r}, {str(outputs)!r}, id_column='id', batch_size=150)\n"
        )
        checkpoint = tmp_path / "out.checkpoint"

        def written():
            return [path for path in checkpoint.glob("*.parquet") if ".pending" not in path.name]

        driver = subprocess.Popen([sys.executable, "-c", script])
        try:
            wait_for(written, 120)
        finally:
            driver.kill()
            driver.wait()
        summary = embed_parquet(str(inputs), str(outputs), id_column="id", batch_size=150)
        print(f"{summary.rows} of {self.SHARDS * self.ROWS} rows were missing when the driver was killed")
        assert 0 < summary.rows < self.SHARDS * self.ROWS
        assert vector_bytes(pq.read_table(outputs)) == vector_bytes(embed_here(pq.read_table(inputs)))
