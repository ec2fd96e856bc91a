"""The application: routes, errors and access put together around one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from hypic.errors import ConfigError
from hypic.version import __version__
from hypic_apps.server import chat, completions, fields, segments, status
from hypic_apps.server.access import Access
from hypic_apps.server.errors import install_handlers
from hypic_apps.server.service import ServedEngine, Service
from hypic_apps.server.settings import ServerSettings


def create_app(engine: ServedEngine, **settings: Any) -> FastAPI:
    """An ASGI application that serves an engine; closing the engine stays with whoever made it.

    Keywords are the fields of ``ServerSettings``.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    unknown = set(settings) - set(ServerSettings.__dataclass_fields__)
    if unknown:
        known = ", ".join(ServerSettings.__dataclass_fields__)
        raise ConfigError(f"unknown server setting {min(unknown)!r}; known are {known}.")
    service = Service(engine, ServerSettings(**settings))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    # The documentation pages would load scripts from elsewhere.
    app = FastAPI(title="hypic", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Access, settings=service.settings)
    install_handlers(app)
    fields.install(app)
    for part in (chat, completions, segments, status):
        app.include_router(part.router)
    return app
