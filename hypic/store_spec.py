"""Where cached segments are kept, as text: ``device://8GiB,host://32GiB,disk:///var/cache/hypic?size=200GiB``.

Tiers stand from the fastest to the slowest, each at most once. This only reads the text; the tiers themselves are in
``hypic/engine/store/``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from hypic.errors import ConfigError

SCHEMES = ("device", "host", "disk")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# A size without a unit counts bytes; below this one a unit was forgotten.
_LEAST_BARE_BYTES = 2**16
_EXAMPLES = {"device": "device://8GiB", "host": "host://32GiB", "disk": "disk:///var/cache/hypic?size=200GiB"}


def parse_bytes(text: str | int) -> int:
    """Bytes from ``8589934592``, ``"8GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: the text is not a number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write bytes or a number with {', '.join(u for u in _UNITS if u)}.")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class TierSpec:
    """One tier: ``scheme`` is one of ``SCHEMES``; only a disk has a ``path``."""

    scheme: str
    budget_bytes: int
    path: Path | None = None


def parse_store(text: str) -> tuple[TierSpec, ...]:
    """The tiers that a text names, in order.

    Raises:
        ConfigError: a tier is unknown, named twice or out of order, or lacks its size or path.
    """
    tiers = tuple(_tier(part.strip(), text) for part in re.split(r",(?=\s*(?:[A-Za-z]+:|$))", text))
    schemes = [tier.scheme for tier in tiers]
    if schemes != sorted(set(schemes), key=SCHEMES.index):
        raise ConfigError(f"store is {text!r}; name each tier once, the fastest first: device, host, disk.")
    return tiers


def _tier(part: str, text: str) -> TierSpec:
    scheme, separator, rest = part.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"'{_EXAMPLES[name]}'" for name in SCHEMES)
        raise ConfigError(f"store is {text!r}, and {part!r} is no tier; known are {known}, joined by commas.")
    return _disk(rest, part) if scheme == "disk" else TierSpec(scheme, _size(rest, part, scheme))


def _disk(rest: str, part: str) -> TierSpec:
    path, _, query = rest.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    if len(given) > len(options):
        raise ConfigError(f"{part!r} has an option twice; name the size once, as in {_EXAMPLES['disk']!r}.")
    unknown = [name for name in options if name != "size"]
    if unknown:
        raise ConfigError(
            f"{part!r} has the option {unknown[0]!r}; all there is is size=, as in {_EXAMPLES['disk']!r}."
        )
    folder = Path(unquote(path)).expanduser()
    if not path or not folder.is_absolute():
        raise ConfigError(f"{part!r} has no absolute path; write it as in {_EXAMPLES['disk']!r} or disk://~/folder.")
    return TierSpec("disk", _size(options.get("size", ""), part, "disk"), folder)


def _size(size: str, part: str, scheme: str) -> int:
    if not size.strip():
        raise ConfigError(f"{part!r} has no size; write it as in {_EXAMPLES[scheme]!r}.")
    try:
        num_bytes = parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"{part!r}: {error}") from error
    # Nobody means so few: a unit was left out, and nothing would ever be kept.
    if size.strip().isdigit() and 0 < num_bytes < _LEAST_BARE_BYTES:
        raise ConfigError(
            f"{part!r} has no unit, so it is a size in bytes, too small for any entry; write it as in "
            f"{_EXAMPLES[scheme]!r}."
        )
    return num_bytes
