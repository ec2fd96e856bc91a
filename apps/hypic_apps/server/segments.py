"""``/v1/hypic/segments``: texts to know and to encode, listed and forgotten; and ``/v1/hypic/tokenize``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from hypic.errors import HypicError
from hypic.types import CacheReport, Policy, Segment
from hypic_apps.server.answers import attended
from hypic_apps.server.errors import LOG, refused
from hypic_apps.server.prompts import Reader, Scope
from hypic_apps.server.schemas import HypicOptions, SegmentsRequest, TokenizeRequest
from hypic_apps.server.service import Service, service_of
from hypic_apps.server.unsupported import check_query
from hypic_apps.server.wire import told_to

router = APIRouter(dependencies=[Depends(check_query)])
BUSY_S = 5.0


@router.post("/v1/hypic/segments")
async def register(body: SegmentsRequest, request: Request) -> Response:
    """Makes texts known, so that they are found again in flat strings, and encodes them."""
    service = service_of(request)
    reader = Reader(Scope(request.state.tenant, body.namespace), service.engine.registry)
    segments = [reader.segment(one) for one in body.segments]
    policy = (body.hypic or HypicOptions()).policy(service.engine.config.policy)
    num_known = service.engine.registry.register(segments)
    reports: Sequence[CacheReport | None] = [None] * len(segments)
    if body.warm:
        warming = _warmed(service, segments, policy)
        if body.wait:
            found = await attended(request.receive, warming)
            reports = [told_to(request.state.tenant, report) for report in found]
        else:
            service.keep(asyncio.create_task(_logged(warming)))
    rows = [_row(service, segment, report) for segment, report in zip(segments, reports, strict=True)]
    status = 202 if body.warm and not body.wait else 200
    return JSONResponse({"object": "list", "data": rows, "num_known": num_known}, status)


@router.get("/v1/hypic/segments")
async def listed(
    request: Request, name: str | None = None, source: str | None = None, namespace: str | None = None
) -> dict[str, Any]:
    """Registered segments that have all of the given labels, and what the store holds."""
    service = service_of(request)
    rows = list(service.catalogue.matching(name=name, source=source, namespace=namespace))
    stats = await service.vitals.stats(BUSY_S)
    return {"object": "list", "data": rows, "store": None if stats is None else stats["store"]}


@router.delete("/v1/hypic/segments")
async def forget(
    request: Request,
    name: str | None = None,
    source: str | None = None,
    namespace: str | None = None,
    everything: bool = False,
) -> dict[str, Any]:
    """Forgets the texts that have all of the given labels: what is cached of them, and that they are known."""
    service = service_of(request)
    labels = _labels(name, source, namespace, everything, "forget")
    forgotten = await asyncio.to_thread(partial(service.engine.forget, **labels, everything=everything))
    service.catalogue.drop(service.catalogue.matching(**labels))
    counts = {"num_forgotten": forgotten.num_entries, **asdict(forgotten)}
    return {"object": "hypic.segments.deleted", "deleted": True, **counts}


@router.get("/v1/hypic/entries")
async def entries(request: Request) -> dict[str, Any]:
    """What is cached, of segments and of conversations."""
    found = await asyncio.to_thread(service_of(request).engine.entries)
    return {"object": "list", "data": [asdict(entry) for entry in found]}


@router.put("/v1/hypic/segments/pin")
async def pin(
    request: Request,
    name: str | None = None,
    source: str | None = None,
    namespace: str | None = None,
    everything: bool = False,
    pinned: bool = True,
) -> dict[str, Any]:
    """Keeps what is cached of the texts that have all of the given labels, or with ``pinned=false`` lets it go."""
    engine = service_of(request).engine
    labels = _labels(name, source, namespace, everything, "pin")
    changed = await asyncio.to_thread(partial(engine.pin if pinned else engine.unpin, **labels))
    return {"object": "hypic.segments.pinned", "pinned": pinned, "num_changed": changed}


def _labels(
    name: str | None, source: str | None, namespace: str | None, everything: bool, what: str
) -> dict[str, str | None]:
    """The labels, of which one is given unless everything is meant.

    Raises:
        ApiError: 400; none is.
    """
    labels = {"name": name, "source": source, "namespace": namespace}
    if not everything and all(value is None for value in labels.values()):
        raise refused(f"say what to {what} with name=, source= or namespace=, or {what} all with everything=true.")
    return labels


@router.post("/v1/hypic/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a text by itself, as segments are encoded."""
    service = service_of(request)
    ids = await asyncio.to_thread(service.engine.tokenize, body.text)
    return {"object": "hypic.tokens", "token_ids": ids, "num_tokens": len(ids)}


def _row(service: Service, segment: Segment, report: CacheReport | None) -> dict[str, Any]:
    row = service.catalogue.note(segment, report)
    return row if report is None else {**row, "report": asdict(report)}


async def _warmed(service: Service, segments: Sequence[Segment], policy: Policy) -> list[CacheReport]:
    run = partial(service.engine.warm, segments, policy=policy)
    return await asyncio.get_running_loop().run_in_executor(service.warming, run)


async def _logged(warming: Any) -> None:
    """Nobody waits for it: what goes wrong goes to the log."""
    try:
        await warming
    except HypicError as error:
        LOG.warning("segments could not be encoded: %s", error)
