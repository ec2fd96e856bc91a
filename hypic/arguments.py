"""What callers pass, looked at before anything is computed for it: one sentence with the value and the way out.

Only what a signature says and Python does not check. Values that mean something, such as lengths, are checked where
they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction, ismethod

from hypic.errors import ConfigError, PromptError
from hypic.policy import is_listed
from hypic.types import Segment


def listed_segments(call: str, given: object) -> list[Segment]:
    """The segments that a call was given, all of them looked at before the first is used.

    Raises:
        PromptError: it is no list of ``Segment``, or one has no text.
    """
    if isinstance(given, Segment):
        raise PromptError(f"{call} was given a single Segment; wrap it in a list.")
    if not is_listed(given):
        raise PromptError(f"{call} was given {given!r:.60}; pass a list of Segment.")
    segments = list(given)
    for one in segments:
        if not isinstance(one, Segment):
            raise PromptError(f"{call} was given {one!r:.60}; pass a list of Segment.")
        if not one.text.strip():
            raise PromptError(f"the segment {one.text!r:.60} has no text but white space; leave it out.")
    return segments


def check_callable(name: str, given: object, wanted: str) -> None:
    """
    Raises:
        ConfigError: it is neither ``None`` nor something that can be called.
    """
    if given is not None and not callable(given):
        raise ConfigError(f"{name} is {given!r:.60}; pass a function {wanted}, or leave it out.")


def check_place(place: object) -> None:
    """
    Raises:
        ConfigError: it is no number of segments.
    """
    if not isinstance(place, int) or isinstance(place, bool) or place < 0:
        raise ConfigError(f"place is {place!r:.60}; pass how many segments stand before, 0 or more.")


def check_forgetful(index: object) -> None:
    """
    Raises:
        ConfigError: it has no ``forget``.
    """
    if not callable(getattr(index, "forget", None)):
        raise ConfigError(
            f"attach was given {index!r:.60}; pass an index with a method forget(source=, name=, namespace=), such as "
            "hypic_retriever.Index."
        )


def check_template_inputs(tools: object, variables: object) -> None:
    """What goes into a chat template beside the messages.

    Raises:
        ConfigError: ``tools`` is no list of descriptions, or ``variables``, the ``chat_template_kwargs``, no mapping.
    """
    if variables is not None and not (isinstance(variables, Mapping) and all(isinstance(n, str) for n in variables)):
        raise ConfigError(
            f"chat_template_kwargs is {variables!r:.60}; pass a mapping of the template's variables, such as "
            "{'enable_thinking': False}."
        )
    is_list = isinstance(tools, Sequence) and all(map(_is_tool, tools))
    if tools is not None and (not is_list or isinstance(tools, str | bytes | bytearray)):
        raise ConfigError(
            f"tools is {tools!r:.60}; pass a list of functions as OpenAI describes them, "
            "{'type': 'function', 'function': {'name': ...}}."
        )


def _is_tool(given: object) -> bool:
    """Whether it is a description with a name, within ``function`` or not, or a function, which describes itself."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return is_named or isfunction(given) or ismethod(given)
