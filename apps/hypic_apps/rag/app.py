"""The application: the page, and the routes that it calls. Loopback only: it lets everybody in who can reach it.

Pages of other origins cannot use it: requests come under this machine's own names, and what changes anything must
come from the page itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypic.errors import HypicError
from hypic.version import __version__
from hypic_apps import corpus
from hypic_apps.rag.errors import NotThere, RagError
from hypic_apps.rag.events import EXPECTED, stream
from hypic_apps.rag.limits import Limits
from hypic_apps.rag.reading import checked_name
from hypic_apps.rag.service import About, Rag
from hypic_apps.server import fields
from hypic_apps.server.access import Access
from hypic_apps.server.errors import error_body, install_handlers
from hypic_apps.server.settings import LOOPBACK_NAMES, ServerSettings

if TYPE_CHECKING:
    from hypic import LLM

STATIC = Path(__file__).parent / "static"
# Nothing of the page comes from elsewhere, nothing in it is a script but its own, and no other page may frame it.
PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; form-action 'none'; "
    "base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
router = APIRouter()


class Pasted(BaseModel):
    """A text with a name."""

    name: str
    text: str


class Edited(BaseModel):
    """The new text of a document."""

    text: str


class Warmed(BaseModel):
    """The document to encode; all without one."""

    document: str | None = None


class Asked(BaseModel):
    """A question, and the conversation that it belongs to; a new one without."""

    question: str
    conversation: str | None = None


class Measured(BaseModel):
    """Which question to measure."""

    conversation: str
    turn: int


def create_app(
    llm: LLM,
    about: About,
    *,
    k: int = 16,
    max_tokens: int = 256,
    limits: Limits = Limits(),
    host_names: Collection[str] | None = LOOPBACK_NAMES,
) -> FastAPI:
    """An ASGI application around an engine, which whoever made it closes.

    ``host_names`` are the names under which requests may come; ``None`` takes any.
    """
    app = FastAPI(title="hypic app", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.rag = Rag(llm, about, k, max_tokens, limits)
    # JSON escapes a character in up to six bytes, and a file is sent as it is.
    longest = max(limits.file_bytes, 6 * limits.document_chars) + 65536
    app.add_middleware(OwnPage)
    app.add_middleware(Access, settings=ServerSettings(host_names=host_names, max_body_bytes=longest))
    install_handlers(app)
    fields.install(app)
    for kind in EXPECTED:
        app.add_exception_handler(kind, _expected)
    app.include_router(router)
    return app


class OwnPage:
    """Refuses what another site's page sends, and adds the headers that keep this page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            body = error_body(403, f"requests of {origin} are refused; open the page itself.")
            await JSONResponse(body, 403)(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [(n.encode(), v.encode()) for n, v in PAGE_HEADERS.items() if n.encode() not in present]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self.app(scope, receive, guarded)


@router.get("/")
async def page() -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html")


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in ("app.css", "app.js", "icon.svg"):
        raise NotThere(f"there is no file {name!r} here.")
    return FileResponse(STATIC / name)


@router.get("/api/state")
async def state(request: Request) -> Mapping[str, Any]:
    return await rag_of(request).state()


@router.post("/api/documents")
async def paste(request: Request, body: Pasted) -> Response:
    return stream(rag_of(request).add({body.name: body.text}))


@router.post("/api/files")
async def upload(request: Request, name: str) -> Response:
    """A file as the body of the request, under a name."""
    rag = rag_of(request)
    shown = checked_name(name, rag.limits)
    return stream(rag.add_file(shown, await request.body()))


@router.post("/api/corpus")
async def sample(request: Request) -> Response:
    """The documents that come with hypic."""
    return stream(rag_of(request).add({d.name: d.text for d in (*corpus.company(), *corpus.articles())}))


@router.get("/api/documents/{id}")
async def document(request: Request, id: str) -> Mapping[str, Any]:
    found = rag_of(request).library.get(id)
    return {"id": id, "name": found.name, "text": found.text}


@router.put("/api/documents/{id}")
async def edit(request: Request, id: str, body: Edited) -> Response:
    rag = rag_of(request)
    return stream(rag.add({rag.library.get(id).name: body.text}))


@router.delete("/api/documents/{id}")
async def delete(request: Request, id: str) -> Mapping[str, Any]:
    return await rag_of(request).remove(id)


@router.post("/api/warm")
async def warm(request: Request, body: Warmed) -> Response:
    return stream(rag_of(request).warm(body.document))


@router.post("/api/ask")
async def ask(request: Request, body: Asked) -> Response:
    return stream(rag_of(request).ask(body.question, body.conversation))


@router.post("/api/measure")
async def measure(request: Request, body: Measured) -> Response:
    return stream(rag_of(request).measure(body.conversation, body.turn))


def rag_of(request: Request) -> Rag:
    """What the application was made around."""
    return cast(Rag, request.app.state.rag)


async def _expected(request: Request, error: Exception) -> JSONResponse:
    """One sentence, in the shape of all errors."""
    status = error.status if isinstance(error, RagError) else 503 if isinstance(error, HypicError) else 400
    return JSONResponse(error_body(status, str(error)), status)
