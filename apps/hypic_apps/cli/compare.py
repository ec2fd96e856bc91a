"""``hypic compare``: why one prompt's answer from segments differs, which segment does it, and what to set."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import NO_THINKING, add_model_options, loaded
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

if TYPE_CHECKING:
    from hypic.compare import Comparison, Way
    from hypic.types import Policy, PromptLike

SUMMARY = "tell why an answer from segments differs from full recompute"
EXAMPLES = """
hypic compare request.json
hypic compare request.json --model path/to/checkpoint --seam 4
hypic compare request.json --json
"""
DETAILS = """REQUEST.json is the body of a chat request, {"messages": [...]}, whose content
parts are segments, or {"segments": ["...", ...], "question": "..."}. Its tools,
its chat_template_kwargs and a policy under "hypic" are followed; flags of the
command line win. The prompt is answered greedily in full, in full in other
company (what rounding does), and from segments. If that gives another answer,
each segment is run live in turn, and wider seams are tried. Fields of a chat
request that say how an answer is chosen have no effect; unknown ones are
refused, as are those that would make another prompt, such as documents."""
FOLLOWED = ("messages", "segments", "question", "tools", "tool_choice", "chat_template_kwargs", "hypic")


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "compare", "REQUEST.json", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("request", metavar="REQUEST.json", help="the prompt, as JSON")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument("--thinking", action="store_true", help="let the model think first, if it can")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads, loads, compares, prints."""
    prompt, options = read(Path(args.request).expanduser(), engine_settings(args))
    from hypic_apps.cli import screen

    console = screen.notes()
    with loaded(args, console, example="hypic compare request.json --model Qwen/Qwen3.5-0.8B") as model:
        console.print(model.introduction, style="dim")
        options["chat_template_kwargs"] = _template(options.get("chat_template_kwargs"), args.thinking)
        with screen.working(console, "answering in several ways"):
            found = model.llm.compare(prompt, args.max_tokens, **options)
    if args.json:
        screen.result_object({"model": args.model or "bundled", **as_json(found)})
        return 0
    for line in lines(found):
        screen.result(line)
    return 0


def read(path: Path, flags: Mapping[str, Any]) -> tuple[PromptLike, dict[str, Any]]:
    """The prompt of a request, and what ``LLM.compare`` is told beside it; ``flags`` win over the request's policy. No
    model is needed to find out what is wrong.

    Raises:
        InputError: the file cannot be read, is of neither form, or has a field that nobody knows, or one under
            ``hypic`` that cannot be right, or one that would make another prompt in a way that hypic has not.
        ConfigError: a value of the policy lies outside its range, it reuses no segments, or ``tools`` are none.
    """
    from hypic import EngineConfig
    from hypic.arguments import check_template_inputs
    from hypic.compare import check_policy

    body, mine = _body(path), EngineConfig.of(**flags).policy
    _refuse_unknown(body, path)
    policy = mine if body.get("hypic") is None else _policy(body["hypic"], flags)
    check_policy(policy)
    prompt, options = _prompt(body, path)
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"chat_template_kwargs is {given!r:.60}; send an object with the template's variables.")
    check_template_inputs(options["tools"], given)
    return prompt, {**options, "policy": policy, "chat_template_kwargs": given}


def _template(given: Mapping[str, Any] | None, thinking: bool) -> dict[str, Any]:
    """The request's variables of the chat template, and no thinking unless they or the flag ask for it."""
    asked = {name: value for name, value in (given or {}).items() if not (thinking and name in NO_THINKING)}
    return asked if thinking else {**NO_THINKING, **asked}


def _body(path: Path) -> Mapping[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{path.name} is no JSON ({error}); write the body of a chat request.") from error
    return body if isinstance(body, Mapping) else {}


def _refuse_unknown(body: Mapping[str, Any], path: Path) -> None:
    """A misspelt field would be passed over, and another prompt compared than was meant. Those of a chat request that
    say how an answer is chosen are known, and have no effect here."""
    others = [name for name in body if name not in FOLLOWED]
    if not others:
        return
    with _server_parts():
        from hypic_apps.server import unsupported
        from hypic_apps.server.errors import ApiError
        from hypic_apps.server.schemas import ChatRequest
    known = (*FOLLOWED, *ChatRequest.model_fields, *unsupported.NAMES)
    for name in others:
        if name not in known:
            close = get_close_matches(name, known, 1)
            way_out = f"write {close[0]}." if close else f"it may have {', '.join(FOLLOWED)}."
            raise InputError(f"{path.name} has the field {name!r:.60}, which is not known; {way_out}")
    try:
        unsupported.check({name: body[name] for name in unsupported.OF_THE_PROMPT if name in body}, (), ())
    except ApiError as error:
        raise InputError(f"the server would refuse {path.name}: {error.detail}") from error


@contextmanager
def _server_parts() -> Iterator[None]:
    """What reads requests as the server does is imported within, where it is installed."""
    try:
        yield
    except ImportError as error:
        raise CommandError(f"{error.name} is missing; install it with pip install 'hypic[apps]'.") from error


def _policy(given: object, flags: Mapping[str, Any]) -> Policy:
    """The policy under ``hypic``, read as the server reads it."""
    from hypic import Policy

    with _server_parts():
        from pydantic import ValidationError

        from hypic_apps.server.fields import invalid
        from hypic_apps.server.schemas import POLICY, HypicOptions
    try:
        options = HypicOptions.model_validate(given)
    except ValidationError as error:
        found = [{**fault, "loc": ("hypic", *fault["loc"])} for fault in error.errors()]
        raise InputError(invalid(found).detail) from error
    mine = {name: flags[name] for name in POLICY if name in flags}
    return options.model_copy(update=mine).policy(Policy())


def _prompt(body: Mapping[str, Any], path: Path) -> tuple[PromptLike, dict[str, Any]]:
    from hypic import Prompt, Segment

    options = {"tools": None if body.get("tool_choice") == "none" else body.get("tools")}
    if isinstance(body.get("messages"), list):
        return body["messages"], options
    if isinstance(body.get("segments"), list) and isinstance(body.get("question"), str):
        given = [Segment(one) if isinstance(one, str) else Segment(**_fields(one, path)) for one in body["segments"]]
        return Prompt(given, body["question"]), options
    raise InputError(f'{path.name} holds neither "messages" nor "segments" and "question"; see hypic compare --help.')


def _fields(one: Any, path: Path) -> dict[str, Any]:
    from hypic import Segment

    known = [field.name for field in fields(Segment)]
    if not isinstance(one, Mapping) or "text" not in one or any(key not in known for key in one):
        raise InputError(f"{path.name} has the segment {one!r:.60}; write text, or an object with {', '.join(known)}.")
    return dict(one)


def as_json(found: Comparison) -> dict[str, Any]:
    """All of it but the log probabilities."""
    ways = {name: [asdict(way) for way in getattr(found, name)] for name in ("live", "seams")}
    main = {"again": asdict(found.again), "segments": asdict(found.segments), **ways}
    return {"full": {"text": found.full.text, "token_ids": list(found.full.token_ids)}, **main, "advice": found.advice}


def lines(found: Comparison) -> Sequence[str]:
    """What a person wants to read."""
    rows = [found.again, found.segments, *found.live, *found.seams]
    width = max(len(way.name) for way in rows)
    heads = f"{'way'.ljust(width)}  same  parts at  margins (nats)     KL   more tokens"
    return [
        f"full recompute: {_short(found.full.text)}",
        f"from segments:  {_short(found.segments.text)}",
        "",
        heads,
        *(_line(way, width) for way in rows),
        "",
        found.advice,
    ]


def _line(way: Way, width: int) -> str:
    parts, margins = "", ""
    if way.difference is not None:
        parts = str(way.difference.position)
        margins = f"{way.difference.margin:.2g} / {way.difference.other_margin:.2g}"
    same = "yes" if way.is_same else "no"
    return f"{way.name.ljust(width)}  {same:4}  {parts:>8}  {margins:>15}  {way.kl:7.1e}  {way.extra_tokens:>8}"


def _short(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= 200 else shown[:197] + "..."
