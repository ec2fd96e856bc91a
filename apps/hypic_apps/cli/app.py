"""``hypic app``: the web page in this process, until it is told to stop."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import socket
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hypic_apps.cli.engine import Loaded, add_model_options, loaded
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive
from hypic_apps.cli.serve import port

if TYPE_CHECKING:
    from rich.console import Console

REAL = "hypic app --model Qwen/Qwen3.5-0.8B"
SUMMARY = "ask your own documents in a web page"
EXAMPLES = """
hypic app
hypic app --open --model path/to/checkpoint
hypic app --port 9000 --k 8
"""
DETAILS = """Paste or drop text, Markdown and PDF, ask, and see which parts of each prompt
were reused. Documents and conversations are kept in this process's memory only.
The page knows no users, so it is served to this machine alone."""
ADVICE = "For a real model: hypic app --model Qwen/Qwen3.5-0.8B (about 2 GB to download, 4 GB of memory)."
MISSING = "is missing; install the page's packages with pip install 'hypic[apps]'."


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "app", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine for itself (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8100, help="port; 0 takes a free one (default: 8100)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--k", type=positive, default=16, help="passages per question (default: 16)")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="longest answer (default: 256)")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Takes the address, loads the model, serves.

    Raises:
        InputError: an address that others could reach.
        CommandError: the address cannot be had, or packages are missing.
    """
    host = loopback(args.host)
    from hypic_apps.cli.screen import notes

    console = notes()
    with (
        _told_to_stop(),
        _taken(host, args.port) as taken,
        loaded(args, console, example=REAL) as model,
    ):
        console.print(model.introduction, style="dim")
        _serve(model, taken, args, console)
    return 0


def loopback(host: str) -> str:
    """The address.

    Raises:
        InputError: it is none of this machine for itself.
    """
    address = "127.0.0.1" if host.lower() == "localhost" else host.strip("[]")
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InputError(
            f"the page lets everybody in and {host!r} is no loopback address; use 127.0.0.1 and reach it from "
            "elsewhere through an SSH tunnel."
        )
    return address


@contextmanager
def _taken(host: str, number: int) -> Iterator[socket.socket]:
    """The address, taken before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        taken = socket.create_server((host, number), family=family)
    except OSError as error:
        raise CommandError(f"{host}:{number} cannot be listened on: {error.strerror}; pass another --port.") from error
    with taken:
        yield taken


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Being told to stop is no failure: exit code 0, and the engine is closed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(model: Loaded, taken: socket.socket, args: argparse.Namespace, console: Console) -> None:
    try:
        import uvicorn

        from hypic_apps.rag.app import create_app
        from hypic_apps.rag.service import About
    except ImportError as error:
        raise CommandError(f"{error.name} {MISSING}") from error
    host, number = taken.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{number}/"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            console.print(f"the page is at {url} (stop with Ctrl+C)", soft_wrap=True)
            if args.open:
                webbrowser.open(url)

    about = About(_introduction(model), ADVICE if model.is_bundled else "")
    names = {"localhost", f"[{host}]" if ":" in host else host}
    app = create_app(model.llm, about, k=args.k, max_tokens=args.max_tokens, host_names=names)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    Server(config).run(sockets=[taken])


def _introduction(model: Loaded) -> str:
    """Who answers, a folder by its own name: the path to it is nobody's business in a page."""
    name = model.llm.model_name
    folder = Path(name).expanduser()
    shown = folder.resolve().name if folder.is_dir() else name
    return model.introduction.splitlines()[0].replace(name, shown, 1)
