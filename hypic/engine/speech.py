"""Requests and pieces of answers as the fields of messages, and back. Everything is checked as it is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hypic import errors
from hypic.engine.plan import Piece
from hypic.engine.task import Task
from hypic.errors import HypicError, WorkerLost
from hypic.types import CacheReport, Completion, Policy, SamplingParams, Segment, SegmentReport, TokenLogprob, Usage


def task_to_json(task: Task) -> dict[str, Any]:
    return {
        "pieces": list(map(_piece_to_json, task.pieces)),
        **{"sampling": asdict(task.sampling), "policy": asdict(task.policy)},
        **{"tokenize_s": task.tokenize_s, "notes": task.notes, "generated": task.generated, "is_head": task.is_head},
    }


def task_of(id: str, fields: Mapping[str, Any]) -> Task:
    """A request as the front sent it.

    Raises:
        WorkerLost: it is none.
    """
    try:
        return Task(
            id=id,
            pieces=[_piece(one) for one in fields["pieces"]],
            sampling=SamplingParams(**fields["sampling"]),
            policy=Policy(**fields["policy"]),
            tokenize_s=float(fields["tokenize_s"]),
            is_head=bool(fields["is_head"]),
            notes=tuple(map(str, fields["notes"])),
            generated=tuple(map(_whole, fields["generated"])),
        )
    except (TypeError, KeyError, ValueError, HypicError) as error:
        raise _strange(error) from error


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    return {
        **{"ids": piece.ids, "segment": piece.segment and asdict(piece.segment), "ends": piece.ends_message},
        # Without these a snapshot made elsewhere would be found from other namespaces, and forgotten with none.
        **{"namespaces": sorted(piece.namespaces), "is_answer": piece.is_answer, "place": piece.place},
        "openings": piece.ends,
    }


def _piece(fields: Mapping[str, Any]) -> Piece:
    segment = Segment(**fields["segment"]) if fields["segment"] else None
    spaces = frozenset(map(str, fields["namespaces"]))
    ids, place = tuple(map(_whole, fields["ids"])), fields["place"]
    return Piece(
        ids,
        segment,
        bool(fields["ends"]),
        spaces,
        bool(fields["is_answer"]),
        None if place is None else _whole(place),
        tuple(map(_whole, fields["openings"])),
    )


def result_to_json(result: Completion | HypicError) -> dict[str, Any]:
    if isinstance(result, HypicError):
        return {"error": type(result).__name__, "message": str(result)}
    return asdict(result)


def result_of(fields: Mapping[str, Any]) -> Completion | HypicError:
    """A piece of an answer or the error that ended it.

    Raises:
        WorkerLost: it is neither.
    """
    try:
        return _error(fields) if "error" in fields else _completion(dict(fields))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _strange(error) from error


def _error(fields: Mapping[str, Any]) -> HypicError:
    kind = vars(errors).get(str(fields["error"]), HypicError)
    is_ours = isinstance(kind, type) and issubclass(kind, HypicError)
    return kind(str(fields["message"])) if is_ours else HypicError(str(fields["message"]))


def _completion(fields: dict[str, Any]) -> Completion:
    report, usage = fields.pop("report"), fields.pop("usage")
    logprobs = tuple(
        TokenLogprob(one["token_id"], one["logprob"], tuple((i, value) for i, value in one["top"]))
        for one in fields.pop("logprobs")
    )
    return Completion(
        text=str(fields["text"]),
        token_ids=tuple(map(_whole, fields["token_ids"])),
        reasoning=str(fields["reasoning"]),
        finish_reason=fields["finish_reason"],
        logprobs=logprobs,
        usage=usage and Usage(**usage),
        report=report and _report(dict(report)),
    )


def _report(fields: dict[str, Any]) -> CacheReport:
    segments = tuple(SegmentReport(**one) for one in fields.pop("segments"))
    policy, notes = Policy(**fields.pop("policy")), tuple(fields.pop("notes"))
    return CacheReport(segments=segments, policy=policy, notes=notes, **fields)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.20} is no token id")
    return value


def _strange(error: Exception) -> WorkerLost:
    return WorkerLost(f"a worker sent a request or an answer that cannot be ({error!r:.120}); it is given up.")
