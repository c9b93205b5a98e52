"""Attention weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from . import _arguments, _encodle
from ._pipeline import Pipeline
from .types import ModelPrecision


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention weights of a text.

    kind: "encoder" and "decoder" are self-attention, "cross" is cross-attention
    queries, keys: the T query tokens and the S key tokens; they differ in cross-attention only
    weights: (L, H, T, S), the weight of each key for each query; rows sum to 1
    truncated: the number of tokens that truncation removed
    title: the texts

    A notebook shows the picture that `svg` returns by default.
    """

    kind: Literal["encoder", "decoder", "cross"]
    queries: list[str]
    keys: list[str]
    weights: np.ndarray
    truncated: int
    title: str = ""

    def svg(self, layer: int | None = None, head: int | Literal["all", "mean"] = "mean") -> str:
        """The picture: small images of all heads, and the chosen heads of a layer enlarged.

        layer: the number of the layer, from 0; the last layer by default
        head: the number of the head, from 0; "all" for every head; "mean" for their mean

        Raises EncodleError for a layer or a head beyond the last, ValueError for a negative number or
        an unknown name.
        """
        return self._picture(layer, head, html=False)

    def html(self, layer: int | None = None, head: int | Literal["all", "mean"] = "mean") -> str:
        """`svg` in an HTML page."""
        return self._picture(layer, head, html=True)

    def _picture(self, layer: int | None, head: int | str, html: bool) -> str:
        _arguments.check_not_negative(layer=layer)
        return _encodle.attention_picture(
            self.queries, self.keys, self.weights, self.title, layer, str(head), html
        )

    def _repr_html_(self) -> str:
        return self.svg()


class AttentionReader(Pipeline[_encodle.AttentionReader]):
    """A model that returns the attention weights of texts.

    model: see `SentenceTransformer`; also decoders and encoder-decoders
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`

    >>> attention = AttentionReader().attentions("I love AI")[0]
    >>> attention.queries, attention.weights.shape
    (['[CLS]', 'i', 'love', 'ai', '[SEP]'], (6, 12, 5, 5))
    """

    _native_class = _encodle.AttentionReader

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            _arguments.BUILTIN_MODEL if model is None else model,
            revision=revision,
            precision=precision,
            threads=threads,
            trust_remote_code=trust_remote_code,
        )

    def attentions(self, text: str, second: str | None = None) -> list[Attention]:
        """The weights of all layers and heads.

        Returns one `Attention` for an encoder or a decoder, and three for an encoder-decoder: those
        of the encoder, of the decoder and of the cross-attention.

        second: the second text of a pair, or the decoder's text of an encoder-decoder, which
            generates this text by default

        Raises EncodleError for a text without tokens or with a lone surrogate, and for a `second`
        text of a decoder.
        """
        _arguments.check_str(text=text, second="" if second is None else second)
        title = text if second is None else f"{text} / {second}"
        return [Attention(*found, title) for found in self._native.attentions(text, second)]
