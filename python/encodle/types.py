"""Types of arguments and results.

The arguments of `encode` and `predict` select the type of the result. The overloads are declared
once, as the `__call__` of a protocol, for all methods of the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload

import numpy as np

if TYPE_CHECKING:
    import scipy.sparse
    import torch
    from typing_extensions import NotRequired, Unpack

LongTexts = Literal["truncate", "refuse", "windows"]
ModelPrecision = Literal["f32", "f16", "bf16", "int8"]
Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Activation = Callable[[Any], Any]


class _Array(Protocol):
    """An array of NumPy, or an object with an array, such as a Series of pandas."""

    def __array__(self) -> np.ndarray: ...


class _Tensor(Protocol):
    """A tensor of torch; this type also works where torch is not installed."""

    def detach(self) -> Any: ...


class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]: ...


class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


#: Several texts. Overloads list `str`, one text, first, because a `str` is a sequence of `str` too; mypy
#: calls that an unsafe overlap.
Texts = Sequence[str] | Iterator[str] | _Array | _ArrowArray | _ArrowStream

#: A pair of texts; a list has two elements.
Pair = tuple[str, str] | list[str]
Pairs = Sequence[Pair] | Iterator[Pair] | np.ndarray

#: Vectors (B, E), or one vector (E,).
Vectors = np.ndarray | Sequence[np.ndarray] | Sequence[Sequence[float]] | Sequence[float]
Tensors = _Tensor | Sequence[_Tensor]


class Features(TypedDict):
    """What `encode` returns for a text with `output_value=None`: arrays, or tensors of torch.

    sentence_embedding: (E,); token_embeddings: (T, hidden_size); the others: (T,)
    """

    sentence_embedding: np.ndarray
    token_embeddings: np.ndarray
    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray


class Classification(TypedDict):
    """The most likely label of a text, its score, and the score of each label."""

    label: str
    score: float
    scores: dict[str, float]


class Span(TypedDict):
    """A part of a text with its score; `start` and `end` count characters."""

    score: float
    text: str
    start: int
    end: int


class Entity(Span):
    """A part of a text with its label."""

    label: str


class Answers(TypedDict):
    """The most likely answers in a text, and the score of "no answer"."""

    answers: list[Span]
    no_answer: float


class Token(TypedDict):
    """A token for a mask, with its score."""

    token_id: int
    token: str
    score: float


class Ranked(TypedDict):
    """A document with its score; `corpus_id` is its index."""

    corpus_id: int
    score: float
    text: NotRequired[str]


class _CallOptions(TypedDict, total=False):
    device: str | torch.device | None
    pool: None
    chunk_size: int | None


class _EncodeOptions(_CallOptions, total=False):
    precision: Precision | None
    normalize_embeddings: bool
    truncate_dim: int | None
    task: str | None
    long_texts: LongTexts


class Encode(Protocol):
    """The signature of `SentenceTransformer.encode`, `encode_query` and `encode_document`."""

    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_EncodeOptions],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: Literal[True],
        **options: Unpack[_EncodeOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        *,
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_EncodeOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        *,
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_EncodeOptions],
    ) -> list[torch.Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap] # see Texts
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["token_embeddings"],
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_EncodeOptions],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["token_embeddings"],
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_EncodeOptions],
    ) -> list[np.ndarray]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap] # see Texts
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        output_value: None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[_EncodeOptions],
    ) -> Features: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        output_value: None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[_EncodeOptions],
    ) -> list[Features]: ...
    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding", "token_embeddings"]
        | None = "sentence_embedding",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[_EncodeOptions],
    ) -> (
        np.ndarray
        | torch.Tensor
        | list[np.ndarray]
        | list[torch.Tensor]
        | Features
        | list[Features]
    ): ...


class _SparseOptions(_CallOptions, total=False):
    save_to_cpu: bool
    max_active_dims: int | None
    task: str | None
    long_texts: LongTexts


class SparseEncode(Protocol):
    """The signature of `SparseEncoder.encode`, `encode_query` and `encode_document`."""

    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: Literal[True] = True,
        convert_to_sparse_tensor: bool = True,
        *,
        output: Literal["torch"] = "torch",
        **options: Unpack[_SparseOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_tensor: Literal[False],
        convert_to_sparse_tensor: bool = True,
        output: Literal["torch"] = "torch",
        **options: Unpack[_SparseOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_tensor: Literal[False],
        convert_to_sparse_tensor: bool = True,
        output: Literal["torch"] = "torch",
        **options: Unpack[_SparseOptions],
    ) -> list[torch.Tensor]: ...
    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        output: Literal["scipy"],
        **options: Unpack[_SparseOptions],
    ) -> scipy.sparse.csr_array: ...
    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        *,
        output: Literal["torch", "scipy"] = "torch",
        **options: Unpack[_SparseOptions],
    ) -> torch.Tensor | list[torch.Tensor] | scipy.sparse.csr_array: ...


class _MultiVectorOptions(_CallOptions, total=False):
    normalize_embeddings: bool
    token_pooling: None
    task: Literal["query", "document"] | None
    long_texts: LongTexts


class MultiVectorEncode(Protocol):
    """The signature of `MultiVectorEncoder.encode`, `encode_query` and `encode_document`."""

    @overload
    def __call__(
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: Literal[False] = False,
        **options: Unpack[_MultiVectorOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: Literal[False] = False,
        **options: Unpack[_MultiVectorOptions],
    ) -> list[torch.Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap] # see Texts
        self,
        inputs: str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        *,
        convert_to_numpy: Literal[True],
        **options: Unpack[_MultiVectorOptions],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        *,
        convert_to_numpy: Literal[True],
        **options: Unpack[_MultiVectorOptions],
    ) -> list[np.ndarray]: ...
    @overload
    def __call__(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: bool = False,
        **options: Unpack[_MultiVectorOptions],
    ) -> torch.Tensor | list[torch.Tensor] | np.ndarray | list[np.ndarray]: ...


class _PredictOptions(_CallOptions, total=False):
    activation_fn: Activation | None
    apply_softmax: bool


class Predict(Protocol):
    """The signature of `CrossEncoder.predict`."""

    @overload
    def __call__(
        self,
        inputs: Pair,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_PredictOptions],
    ) -> np.float32 | np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Pairs,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[_PredictOptions],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Pair | Pairs,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: Literal[True],
        **options: Unpack[_PredictOptions],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Pair | Pairs,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[_PredictOptions],
    ) -> np.float32 | np.ndarray | torch.Tensor | list[torch.Tensor]: ...


class Similarity(Protocol):
    """The signature of `similarity` and `similarity_pairwise`: tensors if an argument has some."""

    @overload
    def __call__(self, embeddings1: Vectors, embeddings2: Vectors) -> np.ndarray: ...
    @overload
    def __call__(self, embeddings1: Tensors, embeddings2: Tensors | Vectors) -> torch.Tensor: ...
    @overload
    def __call__(self, embeddings1: Vectors, embeddings2: Tensors) -> torch.Tensor: ...
