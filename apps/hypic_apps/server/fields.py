"""Fields of a body that cannot be right, each as one sentence with its name, its value and the way out.

What is wrong was found by pydantic, whose own words are about Python's types. Only the first fault is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from hypic_apps.server.errors import ApiError, error_response, refused
from hypic_apps.server.schemas import HypicOptions, SegmentIn

# What to send, by pydantic's name of the fault.
_WANTED: Mapping[str, str] = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "string_pattern_mismatch": "text that is not blank",
    "int_parsing": "a whole number", "float_parsing": "a number", "bool_parsing": "true or false",
    "int_parsing_size": "a smaller number", "finite_number": "a finite number",
}  # fmt: skip
# Names that stand in a place for one of a field's types, beside those with brackets.
_TYPES = ("str", "int", "float", "bool")
_LISTS: Mapping[str, str] = {"list[str]": "a list of texts"}
LONGEST = 80


def install(app: FastAPI) -> None:
    """Bodies that are refused leave in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _invalid)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for this class"
    return error_response(invalid(error.errors()))


def invalid(found: Sequence[Any]) -> ApiError:
    """The first field that validation found fault with, as one sentence."""
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", found[0]["msg"])
        return refused(f"the body is no JSON: {reason}.", code="invalid_json")
    if not _place(found[0]):
        return refused("the body is no JSON object; send one with the header 'Content-Type: application/json'.")
    # A field of several types is reported once for each; what lies deepest is what was meant.
    own = [fault for fault in found if _place(fault)[0] == _place(found[0])[0]]
    deepest = max(own, key=lambda fault: len(_place(fault)))
    same = [fault for fault in own if _place(fault) == _place(deepest)]
    param = ".".join(map(str, _place(deepest)))
    return refused(_sentence(param, same), param)


def _place(fault: Mapping[str, Any]) -> list[str | int]:
    """Names of fields and numbers in lists that lead to a fault, without those of types."""
    parts = [part for part in fault["loc"] if part not in ("body", "query", "path")]
    return [part for part in parts if part not in _TYPES and "[" not in str(part)]


def _sentence(param: str, faults: Sequence[Mapping[str, Any]]) -> str:
    fault, name = faults[0], param.rpartition(".")[2]
    if fault["type"] == "missing":
        return f"{param} is missing; it must be sent."
    if fault["type"] == "extra_forbidden":
        return f"{param} is not known; {_known(param, name)}"
    value = _shown(fault["input"])
    if fault["type"] == "too_short":
        return f"{param} is {value}; send at least {fault['ctx']['min_length']}."
    if fault["type"] == "literal_error":
        return f"{param} is {value}; send {fault['ctx']['expected']}."
    wanted = list(dict.fromkeys(_wanted(one) for one in faults))
    return f"{param} is {value}; send {' or '.join(wanted)}."


def _wanted(fault: Mapping[str, Any]) -> str:
    kind = str(fault["loc"][-1])
    if fault["type"] == "list_type" and kind in _LISTS:
        return _LISTS[kind]
    return _WANTED.get(fault["type"], "another value (" + fault["msg"].rstrip(".") + ")")


def _known(param: str, name: str) -> str:
    """What may stand in the place of an unknown name."""
    kind = SegmentIn if "segments." in param else HypicOptions if param.startswith("hypic.") else None
    names = list(kind.model_fields) if kind is not None else []
    close = get_close_matches(name, names, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"send one of {', '.join(names)}, or leave it out." if names else "leave it out, or check its spelling."


def _shown(value: object) -> str:
    """A value as the client has sent it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
