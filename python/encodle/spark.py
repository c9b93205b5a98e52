"""Embed texts on a Spark cluster.

- `embed`: appends the column of vectors to a DataFrame, by `DataFrame.mapInArrow`.
- `embed_function`: the function that `embed` passes to `mapInArrow`.
- `embed_udf`: a pandas UDF, from a column of texts to a column of vectors.
- `add_package`: sends this package to the executors.

Requires the extra `spark`: `pip install './python[spark]'` in a clone of the repository. The
executors need Python with pyarrow and pandas.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import ArrayType, FloatType, IntegerType, StructField, StructType

import encodle
from encodle import BatchEmbedder, EncodleError
from encodle._rows import embed_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["add_package", "embed", "embed_function", "embed_udf"]

_VECTOR = ArrayType(FloatType(), containsNull=False)
_PAIR = StructType([StructField("index", IntegerType(), False), StructField("value", FloatType(), False)])

#: The type of the column by the kind of the model.
_TYPES = {
    "dense": _VECTOR,
    "sparse": ArrayType(_PAIR, containsNull=False),
    "multi": ArrayType(_VECTOR, containsNull=False),
}

#: The same types in Arrow. Spark has no type for lists of a fixed size, and none for unsigned integers.
_ARROW_TYPES = {
    "dense": pa.list_(pa.float32()),
    "sparse": pa.list_(pa.struct([("index", pa.int32()), ("value", pa.float32())])),
    "multi": pa.list_(pa.list_(pa.float32())),
}


def embed(
    dataframe: DataFrame, model: str | None = None, *, id_column: str | None = None, **settings: Any
) -> DataFrame:
    """Append the column of vectors to a DataFrame: `array<float>`; for a sparse model
    `array<struct<index:int,value:float>>`; for a multi-vector model `array<array<float>>`.

    The driver reads the settings of the model, which select the type of the column. If it cannot read
    them, it expects a dense model.

    Parameters
    ----------
    id_column
        The column whose value names a row in errors and warnings. Default: rows are named by the
        partition and the number in the partition.
    model, **settings
        The arguments of `encodle.BatchEmbedder`. `threads` is `spark.task.cpus` unless it is given.

    Raises
    ------
    EncodleError
        The DataFrame lacks the column of texts or `id_column`, or already has the output column.
        Names are compared without case, unless `spark.sql.caseSensitive` is set.
    TypeError, ValueError
        An argument of `BatchEmbedder` is wrong.
    pyspark.errors.PythonException
        When the DataFrame is computed: a row is invalid (null, not UTF-8, no tokens, or too long
        with `long_texts="refuse"`) and `on_error` is `"raise"`. The message names the row.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> from encodle.spark import embed
    >>> spark = SparkSession.builder.getOrCreate()
    >>> texts = spark.createDataFrame([("I love AI",)], "text string")
    >>> len(embed(texts).first().embedding)
    384
    """
    settings["column"] = _column(dataframe, settings.get("column", "text"))
    id_column = None if id_column is None else _column(dataframe, id_column)
    output_column = settings.get("output_column", "embedding")
    if (existing := _find(dataframe, output_column)) is not None:
        raise EncodleError(
            f"column {existing!r} already exists: expected a new name for the vectors; pass "
            "output_column"
        )
    kind = _kind(BatchEmbedder(model, **settings))
    schema = StructType([*dataframe.schema.fields, StructField(output_column, _TYPES[kind], nullable=False)])
    return dataframe.mapInArrow(_function(model, id_column, settings, kind), schema)


def embed_function(
    model: str | None = None, *, id_column: str | None = None, **settings: Any
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `DataFrame.mapInArrow`; the arguments are those of `embed`.

    Examples
    --------
    >>> texts.mapInArrow(embed_function(), "text string, embedding array<float>")  # doctest: +SKIP
    """
    return _function(model, id_column, settings, None)


def _function(
    model: str | None, id_column: str | None, settings: dict[str, Any], kind: str | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """`embed_function` for a model of this kind; None for any kind."""
    checked = BatchEmbedder(model, **settings)
    # Executors have another working directory: the path of a model is absolute in `checked`.
    model, output_column = checked.model, checked.output_column

    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        embedder, start = _embedder(model, settings, kind), 0
        arrow_type = _ARROW_TYPES[embedder._kind()]
        for batch in batches:

            def name(row: int, batch: pa.RecordBatch = batch, start: int = start) -> str:
                return (
                    f"{id_column} {batch.column(id_column)[row].as_py()!r}"
                    if id_column
                    else _name(start + row)
                )

            embedded, _ = embedder.embed_valid(batch, name)
            start += batch.num_rows
            vectors = embedded.column(output_column).cast(arrow_type)
            columns = [*embedded.columns[:-1], vectors]
            yield pa.RecordBatch.from_arrays(columns, names=embedded.schema.names)

    return function


def embed_udf(model: str | None = None, **settings: Any) -> Callable[..., Any]:
    """A pandas UDF from a column of texts to a column of vectors, of the types of `embed`.

    The arguments are those of `BatchEmbedder`, without `column` and `output_column`; `threads` is
    `spark.task.cpus` by default. A UDF cannot remove rows: with `on_error="skip"`, the vector of an
    invalid row (null, no tokens, or too long with `long_texts="refuse"`) is null. Spark cannot pass
    a text that is not UTF-8 to a pandas UDF, so such a text fails the task; `embed` skips it.

    Examples
    --------
    >>> from encodle.spark import embed_udf
    >>> texts.withColumn("vector", embed_udf(precision="int8")("text"))  # doctest: +SKIP
    """
    for name in ("column", "output_column"):
        if name in settings:
            raise TypeError(f"embed_udf has no argument {name}: the caller of the UDF names its columns")
    checked = BatchEmbedder(model, **settings)
    model, kind = checked.model, _kind(checked)  # the path of a model is absolute in `checked`

    import pandas as pd

    def function(batches: Iterable[Any]) -> Iterator[Any]:
        embedder, start = _embedder(model, settings, kind), 0
        for texts in batches:
            column = pa.array(texts, pa.string(), from_pandas=True)
            yield pd.Series(embed_column(embedder, column, lambda row: _name(start + row)), dtype=object)
            start += len(texts)

    # pandas_udf cannot read annotations that are strings (PEP 563).
    function.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return pandas_udf(function, _TYPES[kind])


def add_package(spark: SparkSession) -> None:
    """Send this package to the executors of a running session.

    The package is sent as the archive `encodle.zip#encodle`.

    The executors unpack the archive into the folder from which Spark's Python workers import
    modules. Python cannot import compiled modules from a zip file, so `addPyFile` and `--py-files`
    do not work.

    For `spark-submit`, make the archive once and pass it by `--archives`:

        $ python -c "import encodle, shutil; shutil.make_archive('encodle', 'zip', encodle.__path__[0])"
        $ spark-submit --archives encodle.zip#encodle job.py
    """
    spark.sparkContext.addArchive(f"{_archive()}#encodle")


@functools.cache
def _archive() -> str:
    """The archive of this package. Spark refuses a second archive of this name with another path."""
    folder = tempfile.mkdtemp(prefix="encodle-")
    # Keep the folder until the driver exits: executors that start later get the archive too.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, package = os.path.join(folder, "encodle.zip"), encodle.__path__[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        # `shutil.make_archive` leaves out the files of a linked folder, such as `encodle/model` in
        # an editable installation.
        for root, _, names in os.walk(package, followlinks=True):
            for name in names:
                file = os.path.join(root, name)
                archive.write(file, os.path.relpath(file, package))
    return path


def _find(dataframe: DataFrame, name: str) -> str | None:
    """The column that Spark finds by this name."""
    if name in dataframe.columns:
        return name
    if dataframe.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
        return None
    return next((column for column in dataframe.columns if column.lower() == name.lower()), None)


def _column(dataframe: DataFrame, name: str) -> str:
    found = _find(dataframe, name)
    if found is None:
        raise EncodleError(f"column {name!r} not found: expected one of {dataframe.columns}")
    return found


def _kind(embedder: BatchEmbedder) -> str:
    """The kind of the model, "dense" if its settings cannot be read here."""
    try:
        return embedder._kind()
    except EncodleError:
        return "dense"


def _embedder(model: str | None, settings: dict[str, Any], kind: str | None = None) -> BatchEmbedder:
    """The embedder of a task. The tasks of a worker process share the model.

    Raises EncodleError if the model is not of this kind; None for any kind.
    """
    context = TaskContext.get()
    if settings.get("threads") is None and context is not None:
        settings = {**settings, "threads": context.cpus()}
    embedder = BatchEmbedder(model, **settings)
    if kind is not None and (got := embedder._kind()) != kind:
        raise EncodleError(
            f"{model} is a {got} model: expected a {kind} one, because the driver could not read the "
            "settings of the model; give the driver access to the model"
        )
    return embedder


def _name(row: int) -> str:
    context = TaskContext.get()
    return f"partition {context.partitionId()}, row {row}" if context else f"row {row}"
