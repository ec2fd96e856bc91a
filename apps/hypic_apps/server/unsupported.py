"""Fields of OpenAI's protocol, and of open servers', that this server does not have: what becomes of each.

None is passed over without a word. What would change the answer is refused, with the way out; what changes nothing, or
has the value that it has here anyway, is taken; what only asks for more or less of the answer is taken and told in the
report's ``notes``. A name that nobody knows is refused, as by OpenAI's own service, with the nearest that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import Request

from hypic_apps.server.errors import ApiError, refused

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
# Whom a request is for, how long it is kept, how soon it is served, what speeds it up: the answer is the same.
_HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"),
    *("prompt_cache_options", "prediction", "priority", "request_id"),
)
_TOLD: Mapping[str, str] = {
    "reasoning_effort": "in chats, chat_template_kwargs tell the model's template how to think",
    "verbosity": "say in the prompt how long the answer should be",
}
USAGE_IN_ALL = "continuous_usage_stats was passed over: the last chunk has the counts, with include_usage"
# Other values of these are refused; those listed are what this server does, the last one being named.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "modalities": (None, ["text"]), "length_penalty": (None, 1.0),
    "skip_special_tokens": (None, True), "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False), "include_reasoning": (None, True),
    "add_generation_prompt": (None, True), "continue_final_message": (None, False),
}  # fmt: skip
LONGEST = 80
_LEAVE = "leave it out"
_INSTEAD: Mapping[str, str] = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "documents": "send them as content parts",
    "chat_template": "serve a model that has it",
    "cache_salt": "send prompt_cache_key, which keeps apart what is cached",
    "return_token_ids": "send hypic.return_tokens",
    "return_tokens_as_token_ids": "send hypic.return_tokens",
}
# Names of other services, refused whatever their value: where what they say belongs here.
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("enable_thinking", "thinking", "reasoning"),
                    "in chats, chat_template_kwargs tell the model's template how to think."),
    "extra_body": "the openai client takes it apart: send its fields beside the others.",
}  # fmt: skip
_REFUSED = (
    *("logit_bias", "audio", "web_search_options", "moderation", "suffix", "echo", "min_tokens", "stop_token_ids"),
    *("bad_words", "allowed_token_ids", "logits_processors", "prompt_logprobs", "use_beam_search"),
    *("truncate_prompt_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_decoding_backend", *_INSTEAD),
)

NAMES: Sequence[str] = (*_REFUSED, *_ONLY, *_HARMLESS, *_TOLD)
"""All that is known here and that this server has not."""
OF_THE_PROMPT: Sequence[str] = (
    *("functions", "function_call", "documents", "chat_template", "suffix", "truncate_prompt_tokens"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Those of them that would make another prompt of the same messages."""


def check(extra: Mapping[str, Any], own: Sequence[str], ours: Sequence[str]) -> None:
    """Refuses what cannot be kept. ``own`` are the fields that the request has, ``ours`` those under ``hypic``.

    Raises:
        ApiError: 400 that names the first such field.
    """
    for name, value in extra.items():
        if name in _REFUSED and value not in _OFF:
            way_out = _INSTEAD.get(name, _LEAVE)
            raise refused(f"{name} is not supported by this server; {way_out}.", name, "unsupported_field")
        if name in _ONLY and value not in _ONLY[name]:
            only = f"this server supports {_ONLY[name][-1]!r} only"
            raise refused(f"{name} is {value!r:.80}; {only}.", name, "unsupported_field")
        if value is not None and name not in NAMES:
            raise _unknown(name, own, ours)


def notes(extra: Mapping[str, Any]) -> Sequence[str]:
    """What is said in the report of fields that were taken and have no effect."""
    given = [name for name in _TOLD if extra.get(name) is not None]
    return [f"{name} was passed over, as this server has no such setting; {_TOLD[name]}" for name in given]


def _unknown(name: str, own: Sequence[str], ours: Sequence[str]) -> ApiError:
    shown = name[:LONGEST] or "''"
    known = {field: f"hypic.{field}" for field in ours} | {field: field for field in (*_HARMLESS, *own)}
    close = get_close_matches(shown, known, 1)
    way_out = _ELSEWHERE.get(name) or (f"did you mean {known[close[0]]}?" if close else f"{_LEAVE}.")
    return refused(f"{shown} is not known to this server; {way_out}", shown, "unknown_field")


def check_query(request: Request) -> None:
    """Refuses parameters of an address that its route does not have, or has once: more would be forgotten, say, than
    was meant.

    Raises:
        ApiError: 400 that names the first such parameter.
    """
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        shown = name[:LONGEST]
        if name not in known:
            close = get_close_matches(name, known, 1)
            way_out = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known) or 'none'}."
            raise refused(f"the parameter {shown} is not known here; {way_out}", shown, "unknown_field")
        if names.count(name) > 1:
            raise refused(f"the parameter {shown} is given {names.count(name)} times; give it once.", shown)
