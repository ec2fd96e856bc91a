"""``hypic serve``: the OpenAI-compatible server in this process, until it is told to stop."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import Loaded, loaded
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.options import add_engine_options
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive
from hypic_apps.server.settings import ServerSettings

if TYPE_CHECKING:
    from rich.console import Console

REAL = "hypic serve Qwen/Qwen3.5-0.8B"
SUMMARY = "serve a model to OpenAI's clients"
EXAMPLES = """
hypic serve
hypic serve path/to/checkpoint --port 9000
hypic serve path/to/checkpoint --host 0.0.0.0 --api-key @keys.txt
curl http://127.0.0.1:8000/v1/models
"""
DETAILS = """Content parts of messages are segments: what is computed for one is used
again, wherever it stands. Clients on this machine need no key; a server that
others can reach needs one, or --no-auth. A key that begins with @ names a file
of keys, one a line, which keeps them out of the list of processes."""
LONGEST_STOP_S = 30


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "serve", "[MODEL]", SUMMARY, EXAMPLES, DETAILS)
    known = "checkpoint folder, or org/name of the Hugging Face Hub (default: hypic-tiny, the bundled model)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=known)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8000, help="port; 0 takes a free one (default: 8000)")
    parser.add_argument("--name", metavar="NAME", help="what clients call the model (default: as it was loaded)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="a key that clients must send; may be given several times")  # fmt: skip
    parser.add_argument("--admin-key", metavar="KEY",
                        help="the key for metrics, and for listing and deleting segments")  # fmt: skip
    parser.add_argument("--no-auth", action="store_true", help="let everybody in who can reach the address")
    parser.add_argument("--share-segments", action="store_true",
                        help="let all API keys use the same cached segments")  # fmt: skip
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N",
                        help="requests that may wait beside those that run (default: 256)")  # fmt: skip
    parser.add_argument("--max-body", type=positive, default=32 * 2**20, metavar="BYTES",
                        help="largest request (default: 33554432)")  # fmt: skip
    parser.add_argument("--keep-alive", type=float, default=10.0, metavar="SECONDS",
                        help="longest silence of a stream (default: 10)")  # fmt: skip
    add_engine_options(parser)
    parser.set_defaults(run=run)


def port(text: str) -> int:
    """A port's number, for argparse."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Checks who may come in, takes the address, loads the model, serves: what can fail at once fails first.

    Raises:
        InputError: an address that others can reach, without a key.
        CommandError: the address cannot be had, or the server's packages are missing.
    """
    settings = _settings(args)
    ServerSettings(**settings)
    from hypic_apps.cli.screen import notes

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise CommandError(f"{missing[0]} is missing; install the server's packages: pip install 'hypic[apps]'.")
    console = notes()
    with (
        _stopped_quietly(),
        _bound(args.host, args.port) as taken,
        loaded(args, console, example=REAL) as model,
    ):
        console.print(model.introduction, style="dim")
        _serve(model, settings, taken, console)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    keys = [key for given in args.api_key for key in _keys(given)]
    admin = None if args.admin_key is None else _keys(args.admin_key)
    if admin is not None and len(admin) != 1:
        raise InputError(f"{args.admin_key!r} holds {len(admin)} keys; there is one admin key.")
    is_local = _is_loopback(args.host)
    if args.no_auth and (keys or admin):
        raise InputError("--no-auth and keys contradict each other; give one of them.")
    if not is_local and not keys and not args.no_auth:
        raise InputError(
            f"others can reach {args.host}, so clients need a key: add --api-key KEY, or --no-auth to let everybody in."
        )
    return {
        "api_keys": keys,
        "admin_key": None if admin is None else admin[0],
        "model_name": args.name or _model_name(args.model),
        "host_names": None if keys or args.no_auth or not is_local else _host_names(args.host),
        "share_segments": args.share_segments,
        "max_waiting": args.max_waiting,
        "max_body_bytes": args.max_body,
        "keep_alive_s": args.keep_alive,
    }


def _host_names(host: str) -> set[str]:
    """The names of this machine for itself, and the one that was given."""
    return {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host.lower()}


def _model_name(model: str | None) -> str | None:
    """A folder by its own name, without the path to it."""
    folder = None if model is None else Path(model).expanduser()
    return folder.resolve().name if folder is not None and folder.is_dir() else model


def _keys(given: str) -> Sequence[str]:
    """The key, or those of the file behind an ``@``."""
    if not given.startswith("@"):
        return [given]
    try:
        keys = Path(given[1:]).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InputError(f"the keys in {given[1:]!r} cannot be read: {reason}.") from error
    if not keys:
        raise InputError(f"{given[1:]!r} holds no key; write one a line.")
    return keys


def _is_loopback(host: str) -> bool:
    return all(ipaddress.ip_address(address[0].partition("%")[0]).is_loopback for _, address in _addresses(host, 0))


def _addresses(host: str, number: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Family and address of every place that a host's name stands for.

    Raises:
        InputError: it stands for none.
    """
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"the host {host!r} is not known ({error}); pass an address of this machine.") from error
    return [(family, address) for family, _, _, _, address in found]


@contextmanager
def _bound(host: str, number: int) -> Iterator[socket.socket]:
    """The address, taken before minutes go into loading, but not listened on before the model can answer."""
    family, address = _addresses(host, number)[0]
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        if sys.platform != "win32":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(address)
        except OSError as error:
            raise CommandError(
                f"{host}:{number} cannot be listened on: {error.strerror}; pass another --host or --port."
            ) from error
        yield taken


@contextmanager
def _stopped_quietly() -> Iterator[None]:
    """A server that is told to stop has done what it should: exit code 0, and the engine is closed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(model: Loaded, settings: dict[str, Any], taken: socket.socket, console: Console) -> None:
    import uvicorn

    from hypic_apps.server.app import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            console.print(f"listening on {_url(taken)}", soft_wrap=True)

    app = create_app(model.llm, **settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
        lifespan="on", timeout_graceful_shutdown=LONGEST_STOP_S,
    )  # fmt: skip
    Server(config).run(sockets=[taken])


def _url(taken: socket.socket) -> str:
    host, number = taken.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{number}/v1"
