"""Embed texts on a Ray cluster.

- `Embedder`: a class for `ray.data.Dataset.map_batches`.
- `embed_parquet`: embeds the files of a folder, one output file per input file.

Requires the extra `ray`: `pip install './python[ray]'` in a clone of the repository.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import ray
import ray.data
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem
from ray.data.checkpoint import CheckpointConfig
from ray.exceptions import RayTaskError

from encodle import BatchEmbedder, EncodleError
from encodle._arguments import check_positive

__all__ = ["Embedder", "Summary", "embed_parquet"]

logger = logging.getLogger("encodle")

#: The key of the settings in the metadata of an output file.
_SETTINGS = b"encodle.settings"

#: The text of the test vector, and the number of the vector's first values that the settings store.
#: The test vector shows whether the weights have changed.
_TEST_TEXT = "A man is eating food."
_TEST_VALUES = 16

# Spark and Avro store their own schema in a file's metadata. That schema lacks the new column, so
# Spark would not read the vectors.
_FOREIGN_SCHEMAS = (b"org.apache.spark.sql.parquet.row.metadata", b"parquet.avro.schema")


class Embedder:
    """A callable class for `map_batches`: appends the column of vectors to each batch.

    An actor opens the model once. The number of threads is the actor's `num_cpus` unless `threads`
    is given. Pass the path of a model as an absolute path: the actor resolves a relative path in
    its own working directory.

    Parameters
    ----------
    model, **settings
        The arguments of `encodle.BatchEmbedder`.

    Examples
    --------
    >>> import ray
    >>> from encodle.ray import Embedder
    >>> dataset = ray.data.from_items([{"text": "I love AI"}])
    >>> dataset = dataset.map_batches(
    ...     Embedder,
    ...     fn_constructor_kwargs={"precision": "int8"},
    ...     batch_format="pyarrow",
    ...     batch_size=2048,
    ...     num_cpus=4,
    ...     compute=ray.data.ActorPoolStrategy(size=8),
    ... )
    >>> len(dataset.take(1)[0]["embedding"])
    384
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if settings.get("threads") is None:
            settings["threads"] = _actor_threads()
        self._embed = BatchEmbedder(model, **settings)
        _ = self._embed.dimension  # opens the model: a wrong name fails here, not at the first batch

    def __call__(self, batch: pa.Table) -> pa.Table:
        if not isinstance(batch, pa.Table):
            raise TypeError(
                f"batch is of type {type(batch).__name__}: expected a pyarrow.Table; pass "
                'batch_format="pyarrow" to map_batches'
            )
        return self._embed(batch)


class Summary(NamedTuple):
    """The outcome of `embed_parquet`."""

    #: Names of the files that this run wrote.
    written: list[str]
    #: Names of the output files that were in `outputs` before the run.
    present: list[str]
    #: Number of rows that this run wrote.
    rows: int
    #: Input file and row number (from 0) of each skipped row. Empty with `id_column`: the workers
    #: log the ids of skipped rows (logger "encodle").
    skipped: list[tuple[str, Any]]


def embed_parquet(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    outputs: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    column: str = "text",
    on_error: str = "raise",
    num_cpus: int = 1,
    actors: int | None = None,
    batch_size: int = 16_384,
    id_column: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    filesystem: FileSystem | None = None,
    **settings: Any,
) -> Summary:
    """Embed Parquet files on a Ray cluster.

    Each input file becomes one output file of the same name.

    An output file is written under a temporary name in `outputs` and renamed when it is complete.
    Input files whose output file exists are skipped, so the same call resumes an interrupted run.
    If a worker or a node dies, its unfinished files are embedded again. The metadata of an output
    file stores the settings of its run: the arguments of `BatchEmbedder` except `on_error` and
    `threads`, the version of the package, and values of a test vector, which the driver computes if
    it can open the model.

    With `id_column`, Ray Data distributes rows instead of files, writes files of about 128 MiB
    (`DataContext.target_max_block_size`) with names of its own, and keeps the ids of written rows
    in `checkpoint` (`ray.data.checkpoint.CheckpointConfig`). The same call then continues with the
    rows that are not written. No settings are stored. Use `id_column` for few, large files. It
    needs a cluster of at least `num_cpus + 2` CPUs.

    Parameters
    ----------
    inputs
        A folder, a Parquet file, or a list of them, as paths or URIs (`s3://bucket/folder`) that
        all nodes can read. Subfolders are not read.
    outputs
        The folder of the output files, created if needed.
    num_cpus
        CPUs of one actor, and its number of threads unless `threads` is given.
    actors
        Number of actors. Default: the CPUs of the cluster at the call, divided by `num_cpus` and
        rounded down, but at least 1. There is at most one actor for each file. With `id_column`, Ray
        starts actors as needed, and `actors` is their maximum number.
    batch_size
        Number of rows that an actor embeds at a time. Without `id_column`, also the maximum number
        of rows of a row group of an output file.
    id_column
        A column of unique ids without nulls.
    checkpoint
        The folder of the checkpoint. Default: `outputs` + `".checkpoint"`. It must not be deleted
        between runs, and is kept after the last.
    filesystem
        The file system of `inputs`, `outputs` and `checkpoint`. Default: by the URI.
    model, column, on_error, **settings
        The arguments of `encodle.BatchEmbedder`.

    Returns
    -------
    Summary

    Raises
    ------
    encodle.EncodleError
        A row is invalid (null, not UTF-8, no tokens, or too long with `long_texts="refuse"`) and
        `on_error` is `"raise"`; a column is missing; the output column exists already; a file cannot
        be read; or an id is null. The message names the file and, for an invalid text, the row. With
        `id_column`, it names the id of an invalid text instead.
    ValueError
        Two input files have the same name, or are in different file systems; an input file is in
        `outputs`; `checkpoint` is given without `id_column`; or, without `id_column`, `outputs` has
        a file that was embedded with other settings, another version or other weights, or a file
        that has the name of an input file and that `embed_parquet` did not write.
    FileNotFoundError
        An input does not exist, or `inputs` has no Parquet file.

    Examples
    --------
    >>> from encodle.ray import embed_parquet
    >>> embed_parquet("s3://bucket/texts", "s3://bucket/vectors", num_cpus=4)  # doctest: +SKIP
    Summary(written=['part-0.parquet', 'part-1.parquet'], present=[], rows=200000, skipped=[])
    """
    settings = {"column": column, "on_error": on_error, **settings}
    embedder = BatchEmbedder(model, **settings)  # checks the arguments; does not open the model
    check_positive(num_cpus=num_cpus, actors=actors, batch_size=batch_size)
    if checkpoint is not None and id_column is None:
        raise ValueError("checkpoint applies only with id_column: expected id_column too, got None")

    source, paths = _parquet_files(inputs, filesystem)
    target, folder = _resolve(outputs, filesystem)
    if any(posixpath.dirname(path) == folder for path in paths):
        raise ValueError(f"{outputs} contains input files: expected another folder for the outputs")
    target.create_dir(folder, recursive=True)
    pool = {
        "num_cpus": num_cpus,
        "actors": actors,
        "batch_size": batch_size,
        "model": embedder.model,
        "settings": settings,
    }
    if id_column is not None:
        stored = (target, f"{folder}.checkpoint")
        if checkpoint is not None:
            stored = _resolve(checkpoint, filesystem)
        return _embed_rows(source, paths, target, folder, id_column, stored, pool)
    return _embed_files(source, paths, target, folder, pool)


def _embed_files(
    source: FileSystem, paths: list[str], target: FileSystem, folder: str, pool: dict[str, Any]
) -> Summary:
    existing = {info.base_name: info for info in target.get_file_info(FileSelector(folder))}
    names = {posixpath.basename(path) for path in paths}
    present = sorted(names & existing.keys())
    expected = _description(BatchEmbedder(pool["model"], **pool["settings"]))
    for name, info in sorted(existing.items()):
        path = posixpath.join(folder, name)
        if name in names and not info.is_file:
            raise ValueError(f"{path} is not a file: choose another folder for the outputs")
        if name not in names and not _is_data_file(info):
            continue
        got = (_schema(target, path).metadata or {}).get(_SETTINGS)
        if got is None and name in names:
            raise ValueError(
                f"{path} exists and is not an output of embed_parquet (its metadata lacks "
                f"{_SETTINGS.decode()}): choose another folder for the outputs"
            )
        if got is not None and not _is_same(got, expected):
            raise ValueError(
                f"{path} was embedded with other settings: expected {expected.decode()}, got "
                f"{got.decode(errors='replace')}; choose another folder for the outputs"
            )
    todo = [path for path in paths if posixpath.basename(path) not in existing]
    reports: list[dict[str, Any]] = []
    if todo:
        actors = pool["actors"] or max(1, int(ray.cluster_resources().get("CPU", 0) // pool["num_cpus"]))
        with _data_context():
            files = ray.data.from_items([{"path": path} for path in todo], override_num_blocks=len(todo))
            reports = files.map(
                _FileEmbedder,
                fn_constructor_args=(
                    source,
                    target,
                    folder,
                    pool["batch_size"],
                    pool["model"],
                    pool["settings"],
                    expected,
                ),
                num_cpus=pool["num_cpus"],
                compute=ray.data.ActorPoolStrategy(size=min(actors, len(todo))),
            ).take_all()
    # Workers that were killed leave temporary files.
    prefixes = tuple(f".{posixpath.basename(path)}." for path in paths)
    for info in target.get_file_info(FileSelector(folder)):
        if info.base_name.endswith(".partial") and info.base_name.startswith(prefixes):
            target.delete_file(info.path)
    reports.sort(key=lambda report: report["path"])
    return Summary(
        written=[posixpath.basename(report["path"]) for report in reports],
        present=present,
        rows=sum(report["rows"] for report in reports),
        skipped=[(report["path"], row) for report in reports for row in report["skipped"]],
    )


class _FileEmbedder:
    """Embeds one file per call."""

    def __init__(
        self,
        source: FileSystem,
        target: FileSystem,
        folder: str,
        batch_size: int,
        model: str | None,
        settings: dict[str, Any],
        description: bytes,
    ) -> None:
        self._source, self._target, self._folder, self._batch_size = source, target, folder, batch_size
        self._embed = Embedder(model, **settings)._embed
        self._description = description

    def __call__(self, item: dict[str, str]) -> dict[str, Any]:
        path = item["path"]
        name = posixpath.basename(path)
        output = posixpath.join(self._folder, name)
        temporary = posixpath.join(self._folder, f".{name}.{uuid.uuid4().hex}.partial")
        rows = 0
        skipped: list[int] = []
        try:
            with (
                self._source.open_input_file(path) as file,
                self._target.open_output_stream(temporary) as sink,
            ):
                parquet = pq.ParquetFile(file)
                schema = _with_description(parquet.schema_arrow, self._description)
                with pq.ParquetWriter(
                    sink, self._embed.output_schema(schema), use_dictionary=schema.names
                ) as writer:
                    start = 0
                    for batch in parquet.iter_batches(batch_size=self._batch_size):
                        batch = batch.replace_schema_metadata(schema.metadata)
                        embedded, left_out = self._embed.embed_valid(
                            batch, lambda row: f"{path}, row {start + row}"
                        )
                        writer.write_batch(embedded, row_group_size=self._batch_size)
                        rows += embedded.num_rows
                        skipped += [start + row for row in left_out]
                        start += batch.num_rows
            self._target.move(temporary, output)
        except BaseException as error:
            if self._target.get_file_info(temporary).is_file:
                self._target.delete_file(temporary)
            if not isinstance(error, (EncodleError, OSError, pa.ArrowException)):
                raise
            message = str(error)
            raise EncodleError(message if path in message else f"{path}: {message}") from error
        return {"path": path, "rows": rows, "skipped": skipped}


def _embed_rows(
    source: FileSystem,
    paths: list[str],
    target: FileSystem,
    folder: str,
    id_column: str,
    checkpoint: tuple[FileSystem, str],
    pool: dict[str, Any],
) -> Summary:
    columns = _schema(source, paths[0]).names
    if id_column not in columns:
        raise EncodleError(f"column {id_column!r} not found in {paths[0]}: expected one of {columns}")
    before = _data_files(target, folder)
    files, path = checkpoint
    if (cpus := ray.cluster_resources().get("CPU", 0)) < pool["num_cpus"] + 2:
        logger.warning(
            "the cluster has %d CPUs: expected num_cpus + 2 = %d, because reading and the checkpoint need "
            "one CPU each; waiting for more nodes", cpus, pool["num_cpus"] + 2,
        )  # fmt: skip
    # Without the checkpoint of a complete run, the next run would write all rows again.
    config = CheckpointConfig(id_column, path, override_filesystem=files, delete_checkpoint_on_success=False)
    with _data_context(checkpoint_config=config):
        ray.data.read_parquet(paths, filesystem=source).map_batches(
            _RowEmbedder,
            fn_constructor_args=(id_column, pool["model"], pool["settings"]),
            batch_format="pyarrow",
            batch_size=pool["batch_size"],
            num_cpus=pool["num_cpus"],
            # Reading needs CPUs too: the pool starts with one actor and grows.
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=pool["actors"]),
        ).write_parquet(folder, filesystem=target)
    after = _data_files(target, folder)
    written = sorted(after - before)
    new = [posixpath.join(folder, name) for name in written]
    rows = pyarrow.dataset.dataset(new, filesystem=target).count_rows() if new else 0
    return Summary(written, sorted(before & after), rows, [])


class _RowEmbedder:
    """Embeds a batch of rows; errors and warnings name rows by their ids."""

    def __init__(self, id_column: str, model: str | None, settings: dict[str, Any]) -> None:
        self._id_column = id_column
        self._embed = Embedder(model, **settings)._embed

    def __call__(self, batch: pa.Table) -> pa.Table:
        ids = batch.column(self._id_column)
        if ids.null_count:
            # The checkpoint would not record these rows, so that each run would write them again.
            raise EncodleError(
                f"column {self._id_column!r} has {ids.null_count} nulls in a batch of {len(ids)} "
                "rows: expected an id in each row; add the missing ids, or call embed_parquet without "
                "id_column"
            )
        embedded, _ = self._embed.embed_valid(
            batch, lambda row: f"{self._id_column} {ids[row].as_py()!r}"
        )
        return embedded


def _schema(filesystem: FileSystem, path: str) -> pa.Schema:
    with filesystem.open_input_file(path) as file:
        try:
            return pq.read_schema(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _data_files(filesystem: FileSystem, folder: str) -> set[str]:
    return {
        info.base_name
        for info in filesystem.get_file_info(FileSelector(folder))
        if _is_data_file(info)
    }


def _is_data_file(info: FileInfo) -> bool:
    return info.is_file and info.extension == "parquet"


@contextmanager
def _data_context(**values: Any) -> Iterator[None]:
    """Set values of Ray Data's context; unwrap a worker's `EncodleError` from a `RayTaskError`."""
    context = ray.data.DataContext.get_current()
    values["raise_original_map_exception"] = True
    previous = {name: getattr(context, name) for name in values}
    try:
        for name, value in values.items():
            setattr(context, name, value)
        yield
    except RayTaskError as error:
        if not isinstance(error.cause, EncodleError):
            raise
        message, _, _ = str(error.cause).partition("\nFailed to apply UDF transform")  # added by Ray
        raise EncodleError(message) from error
    finally:
        for name, value in previous.items():
            setattr(context, name, value)


def _actor_threads() -> int:
    """The actor's `num_cpus`, rounded down, but at least 1."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))


def _resolve(
    path: str | os.PathLike[str], filesystem: FileSystem | None
) -> tuple[FileSystem, str]:
    """The file system and the path in it, with forward slashes and without a final slash."""
    name = os.fspath(path)
    if filesystem is None:
        if "://" in name:
            filesystem, name = FileSystem.from_uri(name)
        else:
            filesystem, name = LocalFileSystem(), os.path.abspath(name)
    return filesystem, name.rstrip("/")


def _parquet_files(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], filesystem: FileSystem | None
) -> tuple[FileSystem, list[str]]:
    """The file system and the sorted paths of the Parquet files."""
    paths: dict[str, str] = {}
    source: FileSystem | None = None
    items = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    for item in items:
        resolved, path = _resolve(item, filesystem)
        source = source or resolved
        if source != resolved:
            raise ValueError(f"{item} is in another file system than {items[0]}: expected one file system")
        info = source.get_file_info(path)
        found = [path]
        if info.type == FileType.Directory:
            found = [
                entry.path
                for entry in source.get_file_info(FileSelector(path))
                if entry.is_file and entry.extension == "parquet" and entry.base_name[0] not in "._"
            ]
        elif not info.is_file:
            raise FileNotFoundError(f"{item} does not exist: expected a folder or a Parquet file")
        for path in found:
            other = paths.setdefault(posixpath.basename(path), path)
            if other != path:
                raise ValueError(
                    f"{other} and {path} have the same name: expected different names, "
                    "because an output file has the name of its input file"
                )
    if source is None or not paths:
        raise FileNotFoundError(f"{inputs} has no file *.parquet: expected at least one")
    return source, sorted(paths.values())


def _description(embedder: BatchEmbedder) -> bytes:
    """The settings that determine the vectors, for the metadata of an output file."""
    settings = {name: value for name, value in vars(embedder).items() if name not in ("on_error", "threads")}
    settings["version"] = version("encodle")
    try:
        vector = embedder._open()._test_values(_TEST_TEXT)
    except EncodleError as error:
        logger.warning("the driver cannot open the model, so changed weights are not detected: %s", error)
    else:
        settings["test_vector"] = [float(f"{value:.4g}") for value in vector[:_TEST_VALUES]]
    return json.dumps(settings, sort_keys=True).encode()


def _is_same(got: bytes, expected: bytes) -> bool:
    """Whether two descriptions have the same settings and, if both have a test vector, similar test
    vectors. The values of similar vectors differ by at most 1 % of the largest value, because the
    rounding depends on the instruction set."""
    try:
        one, other = json.loads(got), json.loads(expected)
        vectors = [settings.pop("test_vector", None) for settings in (one, other)]
    except (ValueError, AttributeError):
        return False
    if one != other or None in vectors:
        return bool(one == other)
    a, b = (np.array(vector, dtype=np.float32) for vector in vectors)
    return a.shape == b.shape and bool(np.abs(a - b).max() <= 0.01 * np.abs(b).max())


def _with_description(schema: pa.Schema, description: bytes) -> pa.Schema:
    metadata = {key: value for key, value in (schema.metadata or {}).items() if key not in _FOREIGN_SCHEMAS}
    return schema.with_metadata({**metadata, _SETTINGS: description})
