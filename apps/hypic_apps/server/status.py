"""``/v1/models``, ``/health``, ``/ready`` and ``/metrics``: what is served, whether it lives, what it has done.

Probes may ask for ``/health`` and ``/ready`` by ``HEAD`` too: the status without a body.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from hypic.errors import HypicError
from hypic.version import __version__
from hypic_apps.server.errors import ApiError
from hypic_apps.server.metrics import CONTENT_TYPE
from hypic_apps.server.service import Service, service_of

router = APIRouter()
# A step may take longer on a CPU; an engine in a long step is busy, not dead.
BUSY_S = 1.0


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(service_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model of this name."""
    service = service_of(request)
    service.check_model(name)
    return _card(service)


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engine's thread lives."""
    service = service_of(request)
    try:
        stats = await service.vitals.stats(BUSY_S)
    except HypicError as error:
        return JSONResponse({"status": "dead", "reason": str(error)}, 503)
    return JSONResponse({"status": "busy" if stats is None else "ok"})


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 while the model is loaded and another request would be taken."""
    if service_of(request).gate.is_full:
        return JSONResponse({"status": "full"}, 503)
    alive = await health(request)
    return alive if alive.status_code != 200 else JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    service = service_of(request)
    try:
        stats = await service.vitals.stats(BUSY_S)
    except HypicError as error:
        raise ApiError(503, str(error), code="worker_lost") from error
    return Response(service.metrics.render(stats), media_type=CONTENT_TYPE)


def _card(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "hypic",
        "max_model_len": engine.max_context,
        "hypic": {"fingerprint": engine.fingerprint, "version": __version__},
    }
