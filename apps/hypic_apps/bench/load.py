"""``hypic bench load``: requests per second that keep a promise of time to first token, arm by arm or server by server.

In this process every arm (``none``, ``prefix``, ``segments``) plays the same trace at growing rates until the p90 of
TTFT breaks the objective; a few more rates between the last that held and the first that broke close in on the limit.
At ``--qps`` only the rates that are named are played. The first requests fill the caches and are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from hypic.engine.engine import Engine
from hypic_apps.bench import plots, replay, servers, traces
from hypic_apps.bench.geometries import Geometry, geometry
from hypic_apps.bench.options import add_common, choices, is_small, note, rates, shown, whole, with_defaults
from hypic_apps.bench.prompts import TextSource
from hypic_apps.bench.rates import Rates, ratios, search, sustained
from hypic_apps.bench.records import about, device_of_settings, number, table
from hypic_apps.bench.replay import Item
from hypic_apps.bench.session import Session, session
from hypic_apps.bench.traces import KINDS, Spec, Trace
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "requests per second at a given time to first token"
EXAMPLES = """
hypic bench load --arms prefix,segments
hypic bench load --kind unique --qps 1 --arms none,segments
hypic bench load --write-trace trace.jsonl
hypic bench load --trace trace.jsonl --url http://127.0.0.1:8000 --qps 0.5,1
"""
DETAILS = """A trace of documents drawn by Zipf's law, with bursts, or an adverse one.
Servers get the same bodies in the same order at the same times."""
MOST_SEARCHED = 4000  # requests of a trace that is searched for the limit
REUSE = ("none", "prefix", "segments")
HEADS = ("arm", "qps", "ttft p50 ms", "p90 ms", "total p50 ms", "requests/s", "tokens/s", "reused", "hit", "encoded",
         "finished", "objective")  # fmt: skip


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "load", "", SUMMARY, EXAMPLES, DETAILS)
    small = Spec()
    parser.add_argument("--arms", type=choices(REUSE), default=list(REUSE), metavar="A,B",
                        help=f"of {','.join(REUSE)} (default: all)")  # fmt: skip
    parser.add_argument("--kind", choices=KINDS, default="rag", help="of the trace that is made (default: rag)")
    parser.add_argument("--requests", type=positive, default=30, metavar="N", help="fewest at a rate (default: 30)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="shortest time of a rate (default: 10)"
    )
    parser.add_argument("--warmup", type=whole, default=60, metavar="N",
                        help="requests that fill the caches first (default: 60)")  # fmt: skip
    parser.add_argument("--documents", type=positive, default=small.num_documents, metavar="N", help="(default: 2000)")
    parser.add_argument("--documents-each", type=positive, default=small.documents_each, metavar="N",
                        help="documents of a request (default: 24)")  # fmt: skip
    parser.add_argument("--document-tokens", type=positive, metavar="N",
                        help="mean length, lognormal (default: 512; small models 64)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, metavar="N", help="(default: 128; small models 8)")
    parser.add_argument("--zipf", type=float, default=small.zipf, metavar="S", help="Zipf's exponent (default: 1.0)")
    parser.add_argument("--qps", type=rates, default=[], metavar="Q,Q", help="play these rates only")
    parser.add_argument(
        "--first-qps", type=float, default=0.5, metavar="Q", help="begin the search here (default: 0.5)"
    )
    parser.add_argument("--refine", type=whole, default=2, metavar="N", help="rates tried near the limit (default: 2)")
    parser.add_argument("--objective", type=float, default=1.0, metavar="SECONDS",
                        help="p90 of the time to first token (default: 1.0)")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS",
                        help="break off a rate that takes longer (default: 300)")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="play these bodies instead: JSON lines with arrival_s")
    parser.add_argument("--write-trace", metavar="FILE", help="write the trace as bodies, and play nothing")
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="play to this server; may be repeated"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the servers")
    parser.add_argument("--plot", metavar="FILE", help="draw TTFT against requests per second")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plays and prints.

    Raises:
        InputError: the trace cannot be read or made.
        CommandError: a server does not answer.
    """
    if args.write_trace:
        traces.write(traces.make(_spec(args, small=False)), Path(args.write_trace))
        return 0
    records = _of_servers(args) if args.url else _of_arms(args)
    kind = args.trace or f"{args.kind} trace"
    found: dict[str, Any] = {
        **about(f"requests per second and time to first token; {kind}"),
        "objective_s": args.objective,
        "sustained_qps": sustained(records),
        "ratios_to_none": ratios(records),
        "records": records,
    }
    if args.plot:
        plots.load(records, args.objective, Path(args.plot))
    return shown(args, found, text)


def _rates(args: argparse.Namespace) -> Rates:
    return Rates(args.qps, args.first_qps, args.refine, args.objective, args.timeout, args.requests, args.seconds)


# -- in this process -------------------------------------------------------------------------------------------------


def _spec(args: argparse.Namespace, small: bool) -> Spec:
    counts = [_rates(args).count(qps) for qps in args.qps] or [MOST_SEARCHED]
    return Spec(
        args.kind,
        args.warmup + sum(counts),
        args.documents,
        args.document_tokens or (64 if small else 512),
        args.documents_each,
        args.zipf,
        output_tokens=args.output_tokens or (8 if small else 128),
    )


def _of_arms(args: argparse.Namespace) -> list[dict[str, Any]]:
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    trace = None if args.trace else traces.make(_spec(args, is_small(device, made)))
    settings = with_defaults(settings, max_running=32, max_context=_longest(trace, made))
    note(f"building {made.name} on {device}")
    records = []
    with session(made, settings, ids=True, seed=settings.get("seed", 0)) as built:
        items = Items.of_trace(trace, built) if trace is not None else Items.of_file(Path(args.trace), built)
        budget = _tenth(built, trace) if args.kind == "thrash" and trace is not None else built.config.store_bytes
        for arm in args.arms:
            built.call(partial(_limit, budget))
            records += [r | {"geometry": made.name, "store_bytes": budget} for r in _arm(built, arm, items, args)]
    return records


def _longest(trace: Trace | None, made: Geometry) -> int:
    if trace is None:
        return int(made.config["max_position_embeddings"])
    turns = [(ask.turn + 1) * trace.spec.mean_tokens for ask in trace.asks]
    prompts = [sum(trace.lengths[number] for number in ask.documents) for ask in trace.asks]
    return max(*turns, *prompts) + trace.spec.question_tokens + trace.spec.output_tokens + 64


@dataclass(frozen=True)
class Items:
    """The requests of a trace by number; prompts are made when they are asked for, documents once."""

    make: Callable[[int], Item]
    count: int

    @classmethod
    def of_trace(cls, trace: Trace, built: Session) -> Items:
        size = int(built.runner.model.embed_tokens.num_embeddings)  # type: ignore[attr-defined]
        document = cache(partial(trace.document, vocab_size=size))

        def make(place: int) -> Item:
            ask = trace.asks[place]
            return Item(ask.arrival_s, trace.pieces(ask, size, document), trace.spec.output_tokens)

        return cls(make, len(trace.asks))

    @classmethod
    def of_file(cls, path: Path, built: Session) -> Items:
        """Raises ``InputError`` where there is no tokenizer for a trace of texts."""
        source, timed = built.source, traces.at_rate(traces.read(path), 1.0)
        if not isinstance(source, TextSource):
            raise InputError("a trace of texts needs a tokenizer, and a geometry has none; pass --geometry hypic-tiny.")

        def make(place: int) -> Item:
            one = timed[place]
            pieces = traces.encoded(source.tokenizer, one.body)
            return Item(one.arrival_s, pieces, int(one.body.get("max_tokens") or 128))

        return cls(make, len(timed))


def _limit(budget_bytes: int | None, engine: Engine) -> None:
    engine.store.budget_bytes = budget_bytes


def _arm(built: Session, arm: str, items: Items, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rates of one arm; every arm starts from an empty store and the same requests."""
    policy = built.policy.with_(reuse=arm)
    built.forget()
    stream = map(items.make, range(items.count))
    warm = [replace(item, arrival_s=0.0, output_tokens=1) for item in islice(stream, args.warmup)]
    note(f"{arm}: filling the caches with {len(warm)} requests")
    replay.play(built, warm, policy, args.timeout)

    def play(qps: float, count: int) -> dict[str, Any] | None:
        chosen = list(islice(stream, count))
        if len(chosen) < count:
            note(f"the trace ends before {qps:.2f} requests a second could be played")
            return None
        first = chosen[0].arrival_s
        note(f"{arm}: {qps:.2f} requests a second")
        timed = [replace(item, arrival_s=(item.arrival_s - first) / qps) for item in chosen]
        return {"arm": arm, **replay.play(built, timed, policy, args.timeout).summary()}

    return search(play, _rates(args))


def _tenth(built: Session, trace: Trace) -> int:
    """A tenth of the bytes of all documents' entries."""
    layout, pool = built.runner.pool.layout, built.runner.pool
    each = layout.state_bytes + layout.transition_bytes
    return sum(each + pool.pages_for(length) * pool.page_bytes for length in trace.lengths.values()) // 10


# -- servers ---------------------------------------------------------------------------------------------------------


def _of_servers(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.trace:
        timed = traces.read(Path(args.trace))
    else:
        made = traces.make(_spec(args, small=False))
        timed = [traces.Timed(ask.arrival_s, made.body(ask)) for ask in made.asks]
    records = []
    for url in args.url:
        server = servers.Server(url, args.api_key)
        said = servers.about(server)
        for record in _server(server, timed, args):
            records.append({**record, "server": said})
    return records


def _server(
    server: servers.Server, timed: Sequence[traces.Timed], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All rates of one server: the first bodies fill its caches, each rate plays the next ones."""
    stream = iter(timed)
    note(f"{server.url}: filling the caches")
    filling = [replace(one, arrival_s=0.0, body={**one.body, "max_tokens": 1}) for one in islice(stream, args.warmup)]
    servers.play(server, filling, args.timeout)

    def play(qps: float, count: int) -> dict[str, Any] | None:
        chosen = list(islice(stream, count))
        if len(chosen) < count:
            note(f"the trace ends before {qps:.2f} requests a second could be played")
            return None
        note(f"{server.url}: {qps:.2f} requests a second")
        before = servers.counters(server)
        played = servers.play(server, traces.at_rate(chosen, qps), args.timeout)
        counted = servers.grown(before, servers.counters(server))
        state = servers.cache_state(played, counted)
        return {"arm": server.url, **played.summary(), "counters": counted, "cache": state}

    return search(play, _rates(args))


def text(result: dict[str, Any]) -> str:
    rows = [
        (r["arm"], number(r["qps"]), number(r["ttft_ms_p50"]), number(r["ttft_ms_p90"]), number(r["total_ms_p50"]),
         number(r["requests_per_s"]), number(r["output_tokens_per_s"]), f"{r['reused_share']:.0%}",
         str(r["segments"]["hit"]), str(r["segments"]["encoded"]), f"{r['finished']} of {r['requests']}",
         "held" if r["held"] else "broken")
        for r in result["records"]
    ]  # fmt: skip
    lines = [table(HEADS, rows), ""]
    for arm, qps in result["sustained_qps"].items():
        lines.append(f"{arm}: {number(qps)} requests a second at a p90 of {result['objective_s']:g} s or less")
    lines += [
        f"{r['arm']} against none at {number(r['qps'])} a second: time to first token x {number(r['ttft_p50'])} "
        f"(p90 x {number(r['ttft_p90'])}), throughput x {number(r['throughput'])}"
        for r in result["ratios_to_none"]
    ]
    lines += [f"{r['arm']}: cache {r['cache']}" for r in result["records"] if "cache" in r]
    return "\n".join(lines)
