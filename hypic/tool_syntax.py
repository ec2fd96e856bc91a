"""One tool call between its tags, in either spelling, and its values as the tool's JSON schema types them.

The XML spelling writes every value as bare text: a string schema keeps it, any other reads it as JSON. See
``tool_calls`` for the spellings and for finding calls in a reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

OPEN_FUNCTION = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)

_TYPE_NAMES: Mapping[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{type(None): "null", list: "array", dict: "object"},
}

Tool = Mapping[str, Any]


class Malformed(ValueError):
    """Why a call cannot be read."""


def function_of(tool: Tool) -> Mapping[str, Any]:
    """A tool's name and schema, with or without OpenAI's wrapper."""
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def read_call(body: str, schemas: Mapping[str, Tool], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of what stands between the tags."""
    if body.lstrip().startswith("{"):
        return _read_json(body)
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise Malformed("<function=...> has no end")
    name, inner = function[1].strip(), function[2]
    arguments: dict[str, Any] = {}
    position = 0
    while inner[position:].strip():
        parameter = _PARAMETER.match(inner, position)
        if parameter is None or "<tool_call>" in parameter[2]:
            raise Malformed(f"{name} has a <parameter=...> that does not end, or text beside its parameters")
        key, text = parameter[1].strip(), parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(text, f"{name}.{key}", schemas.get(name, {}), key, notes)
        position = parameter.end()
    return name, arguments


def _read_json(body: str) -> tuple[str, dict[str, Any]]:
    try:
        call = _json(body)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        arguments = _json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise Malformed(f"it is not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise Malformed("its JSON has no name")
    if not isinstance(arguments, dict) and arguments is not None:
        raise Malformed(f"the arguments of {call['name']} are no JSON object")
    return call["name"], arguments or {}


def _json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Half of a surrogate pair or a number beyond all bounds could never be sent on.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _typed(text: str, label: str, schema: Mapping[str, Any], key: str, notes: list[str]) -> Any:
    """A value of the XML spelling as its schema says; text that does not fit stays text, with a note."""
    types = value_types((schema.get("properties") or {}).get(key) or {}, schema)
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value = _json(bare)
    except ValueError:
        value = text
    if _fits(value, types):
        return int(value) if "number" not in types and isinstance(value, float) else value
    notes.append(f"{label} is {text!r:.60}, which is no {' or '.join(sorted(types))}; it was passed on as text")
    return text


def _fits(value: object, types: frozenset[str]) -> bool:
    kinds: dict[str, bool] = {
        "integer": isinstance(value, int) or (isinstance(value, float) and value.is_integer()),
        "number": isinstance(value, (int, float)),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    return not isinstance(value, bool) and any(kinds.get(kind, False) for kind in types)


def value_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """JSON Schema's type names that a value may have; none when the schema does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, (str, list)):
        return frozenset([named] if isinstance(named, str) else named)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return value_types(_resolved(reference, root), root, depth - 1)
    choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in schema.get(word) or ()]
    found = [value_types(choice, root, depth - 1) for choice in choices]
    constants = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return frozenset().union(*found, (_TYPE_NAMES[type(value)] for value in constants if type(value) in _TYPE_NAMES))


def _resolved(reference: str, root: Any) -> Any:
    """What ``#/a/b`` names in ``root``; nothing when it is not there."""
    for word in reference.removeprefix("#/").split("/"):
        root = root.get(word, {}) if isinstance(root, Mapping) else {}
    return root
