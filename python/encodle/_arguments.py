"""Arguments that several classes share: models, texts, devices, progress."""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from . import _encodle
from ._encodle import EncodleError
from .types import Encode, ModelPrecision, MultiVectorEncode, Predict, Similarity, SparseEncode

logger = logging.getLogger("encodle")

#: The name and the folder of the model that is part of the package.
BUILTIN_NAME = "all-MiniLM-L6-v2"
BUILTIN_MODEL = Path(os.path.abspath(__file__)).parent / "model"
#: Its name on the hub, where its weights are not rounded.
BUILTIN_HUB_NAME = f"sentence-transformers/{BUILTIN_NAME}"


#: Models on the hub whose names have no organisation; `model_path` does not add one to these names.
#: The list is ORIGINAL_TRANSFORMER_MODELS of sentence-transformers.
NAMES_WITHOUT_ORGANIZATION = frozenset(
    """
    albert-base-v1 albert-base-v2 albert-large-v1 albert-large-v2 albert-xlarge-v1 albert-xlarge-v2
    albert-xxlarge-v1 albert-xxlarge-v2 bert-base-cased-finetuned-mrpc bert-base-cased
    bert-base-chinese bert-base-german-cased bert-base-german-dbmdz-cased
    bert-base-german-dbmdz-uncased bert-base-multilingual-cased bert-base-multilingual-uncased
    bert-base-uncased bert-large-cased-whole-word-masking-finetuned-squad
    bert-large-cased-whole-word-masking bert-large-cased
    bert-large-uncased-whole-word-masking-finetuned-squad bert-large-uncased-whole-word-masking
    bert-large-uncased camembert-base ctrl distilbert-base-cased-distilled-squad
    distilbert-base-cased distilbert-base-german-cased distilbert-base-multilingual-cased
    distilbert-base-uncased-distilled-squad distilbert-base-uncased-finetuned-sst-2-english
    distilbert-base-uncased distilgpt2 distilroberta-base gpt2-large gpt2-medium gpt2-xl gpt2
    openai-gpt roberta-base-openai-detector roberta-base roberta-large-mnli
    roberta-large-openai-detector roberta-large t5-11b t5-3b t5-base t5-large t5-small
    transfo-xl-wt103 xlm-clm-ende-1024 xlm-clm-enfr-1024 xlm-mlm-100-1280 xlm-mlm-17-1280
    xlm-mlm-en-2048 xlm-mlm-ende-1024 xlm-mlm-enfr-1024 xlm-mlm-enro-1024 xlm-mlm-tlm-xnli15-1024
    xlm-mlm-xnli15-1024 xlm-roberta-base xlm-roberta-large-finetuned-conll02-dutch
    xlm-roberta-large-finetuned-conll02-spanish xlm-roberta-large-finetuned-conll03-english
    xlm-roberta-large-finetuned-conll03-german xlm-roberta-large xlnet-base-cased xlnet-large-cased
    """.split()
)


def path_text(name: str, value: str | os.PathLike[str]) -> str:
    """The path in the argument `name`. Raises TypeError if it is neither a str nor a path of str."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{name} is {value!r}: expected a str or a path")
    return path


def model_path(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    organization: str | None = None,
    hub: Hub | None = None,
) -> str:
    """The folder or the file of a model as an absolute path, or its name on the hub; by default the
    built-in model. In offline mode, the name of the built-in model on the hub means the built-in model
    if the cache lacks it.

    organization: the organisation to put before a hub name without one
    hub: the settings of the hub; by default those of the environment

    Raises ValueError for a `revision` of a model that is not on the hub, or of a name that already
    has a revision.
    """
    path = BUILTIN_NAME if model is None else path_text("model", model)
    if revision is not None:
        check_str(revision=revision)
    exists = os.path.exists(path)
    is_builtin = model is None or (path == BUILTIN_NAME and not exists)
    if revision is not None and (is_builtin or exists or "@" in path):
        raise ValueError(
            f"revision {revision!r} applies to a model on the hub: expected org/name without @revision, "
            f"got {path!r}"
        )
    if is_builtin:
        return str(BUILTIN_MODEL)
    if exists:
        # Another process that opens the model can have another working directory.
        return os.path.abspath(path)
    name = path.partition("@")[0]
    is_short = name and "/" not in name and os.sep not in name
    if organization and is_short and name.lower() not in NAMES_WITHOUT_ORGANIZATION:
        path = f"{organization}/{path}"
    if path == BUILTIN_HUB_NAME and revision is None:
        if _encodle.is_missing_offline(hub.source(path) if hub else path):
            logger.warning(
                "model %s is not in the cache: using the model of the package, whose weights are "
                "rounded to f16",
                path,
            )
            return str(BUILTIN_MODEL)
        # Processes that get this path, such as workers of a cluster, do not choose again.
        revision = "main"
    return path if revision is None else f"{path}@{revision}"


def portable(path: str) -> str | None:
    """The result of `model_path`, and None for the built-in model.

    Paths are pickled and written to files, and the folder of the built-in model differs between
    machines.
    """
    return None if path == str(BUILTIN_MODEL) else path


def embedding_model(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    hub: Hub | None = None,
    organization: str = "sentence-transformers",
) -> str | None:
    """The `portable` path of an embedding model."""
    return portable(model_path(model, revision, organization, hub))


@dataclass(frozen=True)
class Hub:
    """The settings of the hub that replace those of the environment.

    token: True and None mean the token of the environment, False none
    """

    cache_folder: str | os.PathLike[str] | None
    token: str | bool | None
    local_files_only: bool

    def __post_init__(self) -> None:
        if not (self.token is None or isinstance(self.token, (str, bool))):
            raise TypeError(f"token is {type(self.token).__name__}: expected a str, a bool or None")
        if self.cache_folder is not None:
            path = os.path.abspath(path_text("cache_folder", self.cache_folder))
            object.__setattr__(self, "cache_folder", path)

    def source(self, path: str) -> Any:
        """The first argument of the native models."""
        if self == Hub(None, None, False):
            return path
        token = "" if self.token is False else self.token
        token = None if token is True else token
        return (path, self.cache_folder, token, bool(self.local_files_only))

    def without_token(self) -> Hub:
        """The same settings with the token of the environment, for pickling."""
        return replace(self, token=None if isinstance(self.token, str) else self.token)


@contextmanager
def explained(model: str | os.PathLike[str] | None, path: str | None) -> Iterator[None]:
    """Adds a note to an EncodleError if `model_path` put an organisation before the model name."""
    try:
        yield
    except EncodleError as error:
        given = os.fspath(model or "").partition("@")[0]
        hub_name = "" if path is None or os.path.isabs(path) else path.partition("@")[0]
        if not given or hub_name.partition("/")[2] != given:
            raise
        raise EncodleError(
            f"{error}; no file or folder is named {given!r}, so it was read as {path} on the hub"
        ) from None


def check_device(device: Any) -> None:
    """Raises EncodleError unless the device is the CPU."""
    if device is not None and str(device) not in ("cpu", "cpu:0"):
        raise EncodleError(
            f"device {device!r} is not supported: this package computes on the CPU; pass "
            'device="cpu", and choose the number of threads with threads=N'
        )


def check_single_process(device: Any, pool: Any, chunk_size: int | None) -> None:
    """Raises EncodleError for a pool of processes, and the errors of `check_device`. Without a pool,
    `chunk_size` has no effect, as in sentence-transformers."""
    check_device(device)
    check_positive(chunk_size=chunk_size)
    if pool is not None:
        raise EncodleError(
            "pool is not supported: expected None (all CPUs of the process are used with threads); "
            "use encodle.BatchEmbedder in workers"
        )


#: The precisions of the constructors by the name of the dtype in torch.
PRECISION_OF_DTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
#: The keys of `model_kwargs` that select how torch computes or loads, and not what it computes.
IGNORED_MODEL_KWARGS = ("attn_implementation", "low_cpu_mem_usage", "use_safetensors")


def model_precision(
    precision: ModelPrecision, backend: str, model_kwargs: Mapping[str, Any] | None
) -> ModelPrecision:
    """The precision that the arguments `precision`, `backend` and `model_kwargs` request.

    Raises ValueError for another backend than "torch", whose results those of this package are, and
    for a setting in `model_kwargs` that is not supported or contradicts `precision`.
    """
    if backend != "torch":
        raise ValueError(
            f'backend {backend!r} is not supported: expected "torch" (the models in the format of '
            "transformers are computed by this package itself)"
        )
    if model_kwargs is not None and not isinstance(model_kwargs, Mapping):
        raise TypeError(f"model_kwargs is {model_kwargs!r}: expected a dict")
    settings = {
        name: value
        for name, value in (model_kwargs or {}).items()
        if value is not None and name not in IGNORED_MODEL_KWARGS
    }
    for name in ("dtype", "torch_dtype"):
        if name not in settings:
            continue
        dtype = str(settings.pop(name)).removeprefix("torch.")
        if dtype not in PRECISION_OF_DTYPE:
            raise ValueError(
                f"{name} {dtype!r} is not supported: expected one of {list(PRECISION_OF_DTYPE)}"
            )
        of_dtype = PRECISION_OF_DTYPE[dtype]
        if precision not in ("f32", of_dtype):
            raise ValueError(
                f"{name} is {dtype} and precision is {precision!r}: expected one of the arguments"
            )
        precision = cast(ModelPrecision, of_dtype)
    if settings:
        raise ValueError(
            f"model_kwargs {list(settings)} are not supported: expected dtype, torch_dtype, or one of "
            f"{IGNORED_MODEL_KWARGS}, which have no effect"
        )
    return precision


#: The largest integer that the native functions take.
MAX_INTEGER = (1 << 63) - 1


def _check_integers(arguments: Mapping[str, int | None], least: int, expected: str) -> None:
    for name, value in arguments.items():
        if value is None:
            continue
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}: expected {expected}") from None
        if number < least:
            raise ValueError(f"{name} is {value}: expected {expected}")
        if number > MAX_INTEGER:
            raise ValueError(f"{name} is {value}: expected at most {MAX_INTEGER}")


def check_positive(**arguments: int | None) -> None:
    """Raises for the first argument that is neither None nor a positive integer: TypeError if it is
    not an integer, else ValueError."""
    _check_integers(arguments, 1, "a positive integer")


def check_not_negative(**arguments: int | None) -> None:
    """`check_positive`, but 0 is valid."""
    _check_integers(arguments, 0, "0 or a positive integer")


def check_task(task: str | None) -> None:
    """Raises ValueError for an unknown task of `encode`."""
    if task not in (None, "query", "document"):
        raise ValueError(f'task {task!r} is unknown: expected "query" or "document"')


def check_str(**arguments: str) -> None:
    """Raises TypeError for the first argument that is not a str, EncodleError for a str with a lone
    surrogate."""
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}: expected str")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise EncodleError(
                f"{name} has a lone surrogate: expected Unicode text; decode it again from its bytes"
            ) from None


def pooling_modes(pooling: str | Sequence[str] | None) -> list[str]:
    """The modes in the argument `pooling`.

    Raises TypeError for another type than str, list or tuple, such as a set: the vectors of several
    modes are concatenated in the order of the modes.
    """
    if pooling is None or isinstance(pooling, str):
        return [] if pooling is None else [pooling]
    if not isinstance(pooling, (list, tuple)):
        raise TypeError(f"pooling is {pooling!r}: expected a str, or a list of str")
    for mode in pooling:
        check_str(**{"pooling mode": mode})
    return list(pooling)


def is_single(texts: Any) -> bool:
    """Whether an argument is one text and not a sequence of texts."""
    if isinstance(texts, np.ndarray) and texts.ndim == 0:
        texts = texts.item()
    return isinstance(texts, str)


def as_array(vectors: Any) -> np.ndarray:
    """Vectors as an array of numbers. NumPy has no bfloat16: such tensors become an array of float32.

    Raises TypeError for values that are not numbers.
    """

    def without_bfloat16(value: Any) -> Any:
        is_bfloat16 = str(getattr(value, "dtype", "")) == "torch.bfloat16"
        return value.float() if is_bfloat16 else value

    if isinstance(vectors, (list, tuple)):
        vectors = [without_bfloat16(vector) for vector in vectors]
    try:
        array = np.asarray(without_bfloat16(vectors))
    except ValueError as error:
        raise ValueError(f"vectors cannot be made an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"vectors are of type {type(vectors).__name__} with dtype {array.dtype}: expected an "
            "array, a tensor or a list of numbers"
        )
    return array


def has_tensors(vectors: Any) -> bool:
    """Whether vectors are a tensor of torch or a list of tensors."""
    torch = sys.modules.get("torch")
    first = vectors[0] if isinstance(vectors, (list, tuple)) and vectors else vectors
    return torch is not None and isinstance(first, getattr(torch, "Tensor", ()))


def _is_of_pandas(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "pandas"


def check_not_data_frame(**arguments: Any) -> None:
    """Raises TypeError for a pandas DataFrame, which iterates over the names of its columns."""
    for name, value in arguments.items():
        if _is_of_pandas(value) and not hasattr(value, "tolist"):
            raise TypeError(f"{name} is a pandas DataFrame: expected a list, or one of its columns")


def text_list(texts: Any) -> Any:
    """The texts as the native functions read them: a list, or an Arrow array or stream."""
    if is_single(texts):
        # Not `str(texts)`, which can be another text for a subclass such as an enumeration.
        return [texts.item() if isinstance(texts, np.ndarray) else texts]
    if isinstance(texts, list):
        return texts
    if isinstance(texts, np.ndarray):
        if texts.dtype.kind not in "UOT":  # str, objects, StringDType
            raise TypeError(f"texts are an array of dtype {texts.dtype}: expected strings")
        if texts.ndim != 1:
            raise ValueError(f"texts are an array of shape {texts.shape}: expected one dimension")
        return texts.tolist()
    check_not_data_frame(texts=texts)
    if _is_of_pandas(texts):
        # A Series has an Arrow interface only if pyarrow is installed.
        return texts.tolist()
    if hasattr(texts, "__arrow_c_array__") or hasattr(texts, "__arrow_c_stream__"):
        return texts
    # The order of a set is not defined, so its vectors could not be assigned to its texts.
    if isinstance(texts, (bytes, Mapping, set, frozenset)) or not hasattr(texts, "__iter__"):
        raise TypeError(
            f"texts are of type {type(texts).__name__}: expected a str, a sequence of str, or an "
            "Arrow array of strings"
        )
    return list(texts)


def _accepts_sentences(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the method accepts its argument `inputs` under the name `sentences` too.

    sentence-transformers before version 6 calls the argument `sentences`.
    """

    @functools.wraps(method)
    def renamed(self: Any, *args: Any, **arguments: Any) -> Any:
        if "sentences" in arguments:
            if args or "inputs" in arguments:
                raise TypeError(
                    "inputs and sentences are the same argument: expected one of them, got both"
                )
            arguments["inputs"] = arguments.pop("sentences")
        return method(self, *args, **arguments)

    return renamed


def encode_method(method: Callable[..., Any]) -> Encode:
    """Decorator: the method has the overloads of `Encode`, and accepts `sentences` for `inputs`."""
    return cast(Encode, _accepts_sentences(method))


def sparse_encode_method(method: Callable[..., Any]) -> SparseEncode:
    """Decorator: the method has the overloads of `SparseEncode`, and accepts `sentences` for
    `inputs`."""
    return cast(SparseEncode, _accepts_sentences(method))


def multi_vector_encode_method(method: Callable[..., Any]) -> MultiVectorEncode:
    """Decorator: the method has the overloads of `MultiVectorEncode`, and accepts `sentences` for
    `inputs`."""
    return cast(MultiVectorEncode, _accepts_sentences(method))


def similarity_method(method: Callable[..., Any]) -> Similarity:
    """Decorator: the method has the overloads of `Similarity`, and returns a tensor if an argument has
    tensors."""

    @functools.wraps(method)
    def converted(self: Any, embeddings1: Any, embeddings2: Any) -> Any:
        result = method(self, embeddings1, embeddings2)
        if has_tensors(embeddings1) or has_tensors(embeddings2):
            result = import_torch("the similarity of tensors").from_numpy(result)
        return result

    return cast(Similarity, converted)


def predict_method(method: Callable[..., Any]) -> Predict:
    """Decorator: the method has the overloads of `Predict`, and accepts `sentences` for `inputs`."""
    return cast(Predict, _accepts_sentences(method))


class Conversion:
    """Converts results as `convert_to_numpy` and `convert_to_tensor` request.

    The constructor raises EncodleError if the conversion needs torch and torch is not installed.
    """

    def __init__(self, convert_to_numpy: bool, convert_to_tensor: bool) -> None:
        self.torch: Any = None
        self._as_list = not convert_to_tensor
        if convert_to_tensor or not convert_to_numpy:
            name = "convert_to_tensor=True" if convert_to_tensor else "convert_to_numpy=False"
            self.torch = import_torch(name)

    def __call__(self, array: np.ndarray) -> Any:
        """The array, one tensor, or a list with one tensor per row."""
        converted = self.array(array)
        return list(converted) if self.torch is not None and self._as_list else converted

    def array(self, array: np.ndarray) -> Any:
        """The array, or a tensor of it."""
        return array if self.torch is None else self.torch.from_numpy(array)


def import_package(name: str, argument: str, instead: str) -> Any:
    """The module `name`, which `argument` needs.

    Raises EncodleError, which says what to use instead, if the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise EncodleError(
            f"{argument} needs the package {package}, which is not installed: install it, or {instead}"
        ) from None


def import_torch(
    argument: str, instead: str = "use the numpy arrays that are returned by default"
) -> Any:
    """`import_package` for torch."""
    return import_package("torch", argument, instead)


class Progress:
    """A line on standard error that shows how many items (texts, pairs or records) are done.

    Used as a context manager; `callback` is None if nothing is shown. `total` is 0 if it is not
    known.
    """

    def __init__(self, total: int, show: bool | None, unit: str = "texts") -> None:
        self._total, self._unit = total, unit
        self.callback: Callable[[int], None] | None = self._show if show else None

    @classmethod
    def of(cls, texts: Any, show: bool | None) -> Progress:
        """The progress of texts in a form of `text_list`."""
        return cls(len(texts) if hasattr(texts, "__len__") else 0, show)

    def _show(self, done: int) -> None:
        of = f" of {self._total:,}" if self._total else ""
        sys.stderr.write(f"\r{done:,}{of} {self._unit}")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.callback is not None:
            if kind is None and self._total:
                self._show(self._total)
            sys.stderr.write("\n")
