# The native part of the package. The classes of the package wrap these classes.

from collections.abc import Callable
from typing import Any, Literal, Protocol, final, type_check_only

import numpy as np
from numpy.typing import NDArray

@type_check_only
class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]: ...

@type_check_only
class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...

# A model; or a model, the cache, the token ("" for none), and whether to use only the cache.
_Source = str | tuple[str, str | None, str | None, bool]
_Texts = list[str] | _ArrowArray | _ArrowStream
_Progress = Callable[[int], Any] | None
_Tokens = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
# Offsets, indices and values of the rows of a matrix in compressed form.
_Rows = tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]
_Kind = Literal["encoder", "decoder", "cross"]

__all__ = [
    "AttentionReader",
    "CrossEncoder",
    "Embedder",
    "EncodleError",
    "MultiVectorEmbedder",
    "SparseEmbedder",
    "Task",
    "__version__",
    "attention_picture",
    "embedding_kind",
    "embed_file",
    "is_missing_offline",
]

__version__: str

class EncodleError(Exception): ...

@final
class Embedder:
    def __new__(
        cls,
        model: _Source,
        precision: str,
        pooling: list[str],
        token_budget: int | None,
        threads: int | None,
    ) -> Embedder: ...
    @property
    def truncate_dim(self) -> int | None: ...
    def dimension(self, truncate_dim: int | None) -> int: ...
    @property
    def max_seq_length(self) -> int: ...
    @property
    def prompts(self) -> list[tuple[str, str]]: ...
    @property
    def default_prompt_name(self) -> str | None: ...
    @property
    def similarity_fn_name(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def with_max_seq_length(self, max_seq_length: int) -> Embedder: ...
    def embed(
        self,
        texts: _Texts,
        prompt: str,
        normalize: bool,
        truncate_dim: int | None,
        long_texts: str,
        skip: bool,
        progress: _Progress,
    ) -> tuple[NDArray[np.float32], list[tuple[int, str]]]: ...
    def token_embeddings(
        self, texts: _Texts, prompt: str, progress: _Progress
    ) -> list[NDArray[np.float32]]: ...
    def tokenize(self, texts: _Texts, prompt: str) -> _Tokens: ...

@final
class SparseEmbedder:
    def __new__(cls, model: _Source, precision: str, threads: int | None) -> SparseEmbedder: ...
    @property
    def dimension(self) -> int: ...
    @property
    def max_active_dims(self) -> int | None: ...
    @property
    def has_queries(self) -> bool: ...
    @property
    def max_seq_length(self) -> int: ...
    @property
    def prompts(self) -> list[tuple[str, str]]: ...
    @property
    def default_prompt_name(self) -> str | None: ...
    @property
    def similarity_fn_name(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def with_max_seq_length(self, max_seq_length: int) -> SparseEmbedder: ...
    def embed(
        self,
        texts: _Texts,
        prompt: str,
        queries: bool,
        max_active_dims: int | None,
        long_texts: str,
        skip: bool,
        progress: _Progress,
    ) -> tuple[_Rows, list[tuple[int, str]]]: ...
    def decode(
        self, indices: NDArray[np.uint32], values: NDArray[np.float32]
    ) -> list[tuple[str, float]]: ...
    def tokenize(self, texts: _Texts, prompt: str) -> _Tokens: ...

@final
class MultiVectorEmbedder:
    def __new__(cls, model: _Source, precision: str, threads: int | None) -> MultiVectorEmbedder: ...
    @property
    def dimension(self) -> int: ...
    @property
    def max_seq_length(self) -> int: ...
    @property
    def prompts(self) -> list[tuple[str, str]]: ...
    @property
    def default_prompt_name(self) -> str | None: ...
    @property
    def similarity_fn_name(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def with_max_seq_length(self, max_seq_length: int) -> MultiVectorEmbedder: ...
    def embed(
        self,
        texts: _Texts,
        prompt: str,
        task: str | None,
        long_texts: str,
        skip: bool,
        progress: _Progress,
    ) -> tuple[list[NDArray[np.float32]], list[tuple[int, str]]]: ...
    def similarity(
        self, queries: list[NDArray[np.float32]], documents: list[NDArray[np.float32]], function: str
    ) -> NDArray[np.float32]: ...
    def similarity_pairwise(
        self, queries: list[NDArray[np.float32]], documents: list[NDArray[np.float32]], function: str
    ) -> NDArray[np.float32]: ...
    def tokenize(self, texts: _Texts, prompt: str) -> _Tokens: ...

@final
class CrossEncoder:
    def __new__(cls, model: _Source, precision: str, threads: int | None) -> CrossEncoder: ...
    @property
    def labels(self) -> list[str]: ...
    @property
    def max_seq_length(self) -> int: ...
    @property
    def prompts(self) -> list[tuple[str, str]]: ...
    @property
    def default_prompt_name(self) -> str | None: ...
    @property
    def threads(self) -> int: ...
    def with_max_seq_length(self, max_seq_length: int) -> CrossEncoder: ...
    def score_pairs(
        self, first: _Texts, second: _Texts, prompt: str, activation: bool, progress: _Progress
    ) -> NDArray[np.float32]: ...

@final
class Task:
    def __new__(cls, task: str, model: str, precision: str, threads: int | None) -> Task: ...
    @property
    def labels(self) -> list[str]: ...
    def run(self, texts: _Texts, params: dict[str, Any]) -> list[dict[str, Any]]: ...

@final
class AttentionReader:
    def __new__(cls, model: str, precision: str, threads: int | None) -> AttentionReader: ...
    def attentions(
        self, text: str, second: str | None
    ) -> list[tuple[_Kind, list[str], list[str], NDArray[np.float32], int]]: ...

def attention_picture(
    queries: list[str],
    keys: list[str],
    weights: NDArray[np.float32],
    title: str,
    layer: int | None,
    head: str,
    html: bool,
) -> str: ...
def embed_file(
    embedder: Embedder,
    input: str,
    output: str,
    input_format: str | None,
    output_format: str | None,
    field: str | None,
    dtype: str,
    prompt: str,
    long_texts: str,
    resume: bool,
    skip: bool,
    description: str,
    on_skipped: Callable[[str], None],
    progress: _Progress,
) -> tuple[int, int, int, int, list[str], list[str]]: ...
def embedding_kind(source: _Source) -> str: ...
def is_missing_offline(source: _Source) -> bool: ...
