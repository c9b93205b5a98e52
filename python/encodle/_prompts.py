"""The prompts of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from . import _arguments

logger = logging.getLogger("encodle")


def merged(
    defaults: Mapping[str, str],
    of_files: Iterable[tuple[str, str]],
    given: Mapping[str, str] | None,
) -> dict[str, str]:
    """The prompts by name. Those of the caller take precedence over those of the model's files.

    Raises TypeError if the prompts of the caller are not a mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"prompts is {given!r}: expected a dict from names to texts")
    return {**defaults, **dict(of_files), **(given or {})}


def check_default(prompts: Mapping[str, str], name: str | None) -> str | None:
    """Raises ValueError if the default prompt does not exist."""
    if name is not None and name not in prompts:
        raise ValueError(
            f"default_prompt_name {name!r} is unknown: expected one of {list(prompts)}"
        )
    return name


def resolve(
    prompts: Mapping[str, str], default: str | None, prompt: str | None, prompt_name: str | None
) -> str:
    """The text to put before each input.

    Raises ValueError for a name that the model does not have; the errors of `check_str` for the
    text.
    """
    if prompt is not None:
        _arguments.check_str(prompt=prompt)
        if prompt_name is not None:
            logger.warning("prompt and prompt_name are both given: prompt_name is ignored")
        return prompt
    name = default if prompt_name is None else prompt_name
    if name is None:
        return ""
    _arguments.check_str(prompt_name=name)
    if name not in prompts:
        raise ValueError(f"prompt_name {name!r} is unknown: expected one of {list(prompts)}")
    _arguments.check_str(**{f"prompts[{name!r}]": prompts[name]})
    return prompts[name]
