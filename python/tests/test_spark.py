"""Embedding on Spark, with the real PySpark: a local cluster of two executors of one CPU each.

Tests with the marker `cluster` kill processes of the cluster with SIGKILL.
"""

import logging
import os
import signal
import sys
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import GOLDEN, MINILM

import encodle
from encodle import EncodleError

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from pyspark.sql import SparkSession

from clusters import When, descendants, command, embed_here, kill, vector_bytes, wait_for, write_shards
import encodle.spark
from encodle.spark import add_package, embed, embed_function, embed_udf


SPARSE, MULTI = GOLDEN / "sparse/splade_max", GOLDEN / "multi_vector/expansion"


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_WORKER_DIR"] = str(tmp_path_factory.mktemp("spark"))
    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    add_package(session)
    yield session
    session.stop()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three files of 40 rows."""
    return write_shards(tmp_path_factory.mktemp("shards") / "texts", 3, 40)


def arrow(dataframe) -> pa.Table:
    """The rows of a DataFrame, with the vectors as lists of a fixed size."""
    table = dataframe.toArrow()
    column = table.schema.get_field_index("embedding")
    vectors = table.column(column).combine_chunks()
    vectors = pa.FixedSizeListArray.from_arrays(vectors.flatten(), 384)
    return table.set_column(column, "embedding", vectors)


class TestEmbed:
    def test_vectors_are_bit_identical_to_those_of_one_process(self, spark, shards):
        texts = spark.read.parquet(str(shards))
        embedded = embed(texts, precision="int8")
        assert embedded.schema.simpleString() == "struct<id:bigint,text:string,embedding:array<float>>"
        expected = embed_here(pq.read_table(shards), precision="int8")
        assert vector_bytes(arrow(embedded)) == vector_bytes(expected)

    def test_the_function_runs_with_map_in_arrow(self, spark, shards):
        texts = spark.read.parquet(str(shards))
        schema = "id long, text string, embedding array<float>"
        embedded = texts.mapInArrow(embed_function(truncate_dim=2), schema)
        assert [len(row.embedding) for row in embedded.take(3)] == [2, 2, 2]

    def test_the_udf_gives_the_same_vectors(self, spark, shards):
        texts = spark.read.parquet(str(shards))
        embedded = texts.withColumn("embedding", embed_udf()("text"))
        assert embedded.schema["embedding"].dataType.simpleString() == "array<float>"
        assert vector_bytes(arrow(embedded)) == vector_bytes(embed_here(pq.read_table(shards)))

    @pytest.mark.parametrize(
        ("folder", "column_type"),
        [
            (SPARSE, "array<struct<index:int,value:float>>"),
            (MULTI, "array<array<float>>"),
        ],
    )
    def test_sparse_and_multi_vector_models_have_columns_of_lists(self, spark, shards, folder, column_type):
        settings = {"prompt_name": "document", "on_error": "skip", "output_column": "embedding"}
        texts = spark.read.parquet(str(shards))
        texts = texts.selectExpr("id", "if(id = 7, null, text) as text")
        here = encodle.BatchEmbedder(folder, **settings)(texts.toArrow())
        expected = dict(zip(here["id"].to_pylist(), here["embedding"].to_pylist(), strict=True))
        assert len(expected) == 119 and all(expected.values())
        embedded = embed(texts, folder, **settings)
        assert embedded.schema["embedding"].dataType.simpleString() == column_type
        del settings["output_column"]
        udf = texts.withColumn("embedding", embed_udf(folder, **settings)("text"))
        assert udf.schema["embedding"].dataType.simpleString() == column_type
        for frame, extra in ((embedded, {}), (udf, {7: None})):
            table = frame.toArrow()
            got = dict(zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True))
            assert got == expected | extra

    def test_a_model_that_the_driver_cannot_read_must_be_dense(self, spark, shards, monkeypatch):
        texts = spark.read.parquet(str(shards))
        monkeypatch.setattr(encodle.spark, "_kind", lambda _: "dense")
        with pytest.raises(Exception, match="EncodleError: .* is a sparse model: expected a dense one"):
            embed(texts, SPARSE).collect()

    def test_workers_import_the_package_from_the_archive(self, spark):
        def files(_):
            from pyspark import SparkFiles

            import encodle._encodle
            import encodle.spark

            root = SparkFiles.getRootDirectory()
            yield [os.path.relpath(module.__file__, root) for module in (encodle._encodle, encodle.spark)]

        (found,) = spark.sparkContext.parallelize([0], 1).mapPartitions(files).collect()
        assert found == ["encodle/_encodle.abi3.so", "encodle/spark.py"]

    def test_threads_are_the_cpus_of_a_task(self, spark):
        def threads(_):
            from encodle.spark import _embedder

            yield _embedder(None, {}).threads
            yield _embedder(None, {"threads": 3}).threads

        assert spark.sparkContext.parallelize([0], 1).mapPartitions(threads).collect() == [1, 3]

    def test_a_null_text_is_an_error_that_names_the_row(self, spark, tmp_path):
        texts = spark.read.parquet(str(write_shards(tmp_path / "in", 1, 10, null_rows=(7,))))
        with pytest.raises(Exception, match="EncodleError: partition 0, row 7, column 'text': .*null"):
            embed(texts).collect()
        with pytest.raises(Exception, match="EncodleError: id 7, column 'text': .*null"):
            embed(texts, id_column="id").collect()
        with pytest.raises(Exception, match="EncodleError: partition 0, row 7, column 'text': .*null"):
            texts.select(embed_udf()("text")).collect()

    def test_skip_removes_rows_and_the_udf_gives_null(self, spark, tmp_path):
        texts = spark.read.parquet(str(write_shards(tmp_path / "in", 1, 10, null_rows=(7,))))
        rows = embed(texts, on_error="skip").collect()
        assert [row.id for row in rows] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
        vectors = texts.select(embed_udf(on_error="skip")("text").alias("v")).collect()
        assert [number for number, row in enumerate(vectors) if row.v is None] == [7]

    def test_skipped_rows_are_logged_by_id(self, caplog):
        batch = pa.record_batch({"id": ["a", "b"], "text": ["I love AI", None]})
        with caplog.at_level(logging.WARNING, "encodle"):
            (embedded,) = embed_function(on_error="skip", id_column="id")(iter([batch]))
        assert embedded.num_rows == 1
        assert "1 of 2 rows skipped: id 'b', column 'text'" in caplog.text

    def test_names_of_columns_are_compared_as_spark_compares_them(self, spark):
        texts = spark.createDataFrame([(1, "I love AI")], "ID long, Text string")
        (row,) = embed(texts, column="text", id_column="id").collect()
        assert len(row.embedding) == 384 and row.Text == "I love AI"
        with pytest.raises(EncodleError, match="column 'Text' already exists: expected a new name"):
            embed(texts, column="text", output_column="text")
        spark.conf.set("spark.sql.caseSensitive", "true")
        try:
            with pytest.raises(EncodleError, match="column 'text' not found"):
                embed(texts)
            assert embed(texts, column="Text", output_column="text").columns == ["ID", "Text", "text"]
        finally:
            spark.conf.unset("spark.sql.caseSensitive")

    def test_the_archive_has_the_files_of_linked_folders(self, tmp_path, monkeypatch):
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights/config.json").touch()
        (tmp_path / "package").mkdir()
        (tmp_path / "package/__init__.py").touch()
        (tmp_path / "package/model").symlink_to(tmp_path / "weights")
        monkeypatch.setattr(encodle, "__path__", [str(tmp_path / "package")])
        with zipfile.ZipFile(encodle.spark._archive.__wrapped__()) as archive:
            assert sorted(archive.namelist()) == ["__init__.py", "model/config.json"]

    def test_the_path_of_a_model_is_absolute_on_the_executors(self, spark, tmp_path, monkeypatch):
        (tmp_path / "encoder").symlink_to(MINILM)
        monkeypatch.chdir(tmp_path)
        texts = spark.createDataFrame([("I love AI",)], "text string")
        embedded, by_udf = embed(texts, "encoder"), texts.select(embed_udf("encoder")("text").alias("v"))
        assert len(embedded.first().embedding) == len(by_udf.first().v) == 384

    def test_wrong_arguments_are_errors(self, spark):
        with pytest.raises(TypeError, match="batch_size"):
            embed_function(batch_size=3)
        with pytest.raises(TypeError, match="embed_udf has no argument column"):
            embed_udf(column="text")


def executors():
    """The executors (JVMs) of the cluster that this process started."""
    return [pid for pid in descendants(os.getpid()) if "CoarseGrainedExecutorBackend" in command(pid)]


def python_workers():
    """The Python processes that run tasks: the descendants of the executors' daemons."""
    daemons = [pid for pid in descendants(os.getpid()) if "pyspark.daemon" in command(pid)]
    return [child for pid in daemons for child in descendants(pid)]


@pytest.mark.cluster
class TestKilledProcesses:
    SHARDS, ROWS = 16, 150

    def embed(self, spark, tmp_path, kill_processes):
        """Embed `SHARDS` partitions, one task each; call `kill_processes` when three tasks are done.
        Check the rows."""
        inputs = write_shards(tmp_path / "in", self.SHARDS, self.ROWS)
        texts = spark.read.parquet(str(inputs)).repartition(self.SHARDS, "id")
        tracker = spark.sparkContext.statusTracker()

        def done():
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            return max([s.numCompletedTasks for s in stages if s and s.numTasks == self.SHARDS], default=0)

        def act():
            return done(), kill_processes()

        with When(lambda: done() >= 3, act) as action:
            embed(texts).write.parquet(str(tmp_path / "out"))
        tasks, killed = action.result
        print(f"{tasks} of {self.SHARDS} tasks were done when processes {killed} were killed")
        assert 3 <= tasks < self.SHARDS and killed
        table = arrow(spark.read.parquet(str(tmp_path / "out")))
        assert vector_bytes(table) == vector_bytes(embed_here(pq.read_table(inputs)))

    def test_a_killed_python_worker_loses_no_rows(self, spark, tmp_path):
        def kill_worker():
            pids = wait_for(python_workers)[:1]
            kill(pids)
            return pids

        self.embed(spark, tmp_path, kill_worker)

    def test_a_killed_executor_loses_no_rows(self, spark, tmp_path):
        def kill_executor():
            pid = min(executors())
            pids = [pid, *descendants(pid)]
            kill(pids)
            return pids

        self.embed(spark, tmp_path, kill_executor)
        wait_for(lambda: len(executors()) == 2)

    def test_a_worker_killed_as_if_out_of_memory_is_started_again(self, spark, shards, tmp_path):
        marker = str(tmp_path / "killed")
        function = embed_function()

        def out_of_memory(batches):
            """Kill the process in the first call, with SIGKILL as the kernel's out-of-memory killer does."""
            if not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield from function(batches)

        texts = spark.read.parquet(str(shards))
        embedded = texts.mapInArrow(out_of_memory, "id long, text string, embedding array<float>")
        assert vector_bytes(arrow(embedded)) == vector_bytes(embed_here(pq.read_table(shards)))
        assert os.path.exists(marker)
