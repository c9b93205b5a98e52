"""What the classes of models share: pickling, copies, and the constructor of pipelines."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import _arguments

if TYPE_CHECKING:
    from .types import ModelPrecision

Native = TypeVar("Native")
Model = TypeVar("Model", bound="Reopened[Any]")


class Reopened(Generic[Native]):
    """A model that is pickled without its native part; unpickling opens the model again. Copies share
    the native part, which never changes."""

    _native: Native

    def _open(self) -> Native:
        """Opens the model that the other attributes describe."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._native = self._open()

    def __copy__(self: Model) -> Model:
        return self._with(self.__dict__)

    def __deepcopy__(self: Model, memo: dict[int, Any]) -> Model:
        memo[id(self._native)] = self._native
        return self._with(copy.deepcopy(self.__dict__, memo))

    def _with(self: Model, attributes: dict[str, Any]) -> Model:
        model = object.__new__(type(self))
        model.__dict__.update(attributes)
        return model


class Pipeline(Reopened[Native]):
    """A model that is used through the methods of a subclass.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    #: The class of the native part.
    _native_class: Callable[[str, str, int | None], Native]

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        _arguments.check_positive(threads=threads)
        self._name = _arguments.portable(_arguments.model_path(model, revision))
        self._settings = (precision, threads)
        self._native = self._open()

    def _open(self) -> Native:
        return self._native_class(_arguments.model_path(self._name), *self._settings)
