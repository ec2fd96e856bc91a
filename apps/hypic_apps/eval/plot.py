"""Two plots as SVG, written by hand so that no plotting package is needed: quality against time, drift by depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hypic_apps.eval.drift import Drift
from hypic_apps.eval.records import Record
from hypic_apps.eval.tables import by_key, primary

STEPS, FEW = (1.0, 2.0, 5.0), 400.0
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 150, 30, 50
COLOURS = (
    "#1f6fb4", "#c8502d", "#2f8f4e", "#7a4fa3", "#b08a1e", "#3f9aa8", "#a33d6b", "#5a5a5a", "#0b3d91", "#e08a6d",
    "#7fbf7b", "#c2a5cf", "#d9c27a", "#8fd0d8", "#e29bbd", "#aaaaaa",
)  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """A range of values on so many pixels; ``log`` axes hold positive values only."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        low, high = scale(self.low), scale(self.high)
        return self.start + (scale(value) - low) / ((high - low) or 1.0) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, and twice and five times them where there are few; whole numbers, or five even steps."""
        if self.log:
            steps = STEPS if self.high <= FEW * self.low else (1.0,)
            powers = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            found = [step * 10.0**n for n in powers for step in steps]
            return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
        if self.high - self.low < 64:
            return [float(n) for n in range(int(self.low), int(self.high) + 1, 1 + int(self.high - self.low) // 16)]
        return [self.low + n * (self.high - self.low) / 5 for n in range(6)]


def quality_against_time(records: Sequence[Record], name: str) -> str:
    """Every arm of a set: its metric in per cent with its interval, over the time to the first token."""
    found = by_key(records)
    arms = list(dict.fromkeys(r.arm for r in records if r.set == name))
    points = [(arm, found.get((name, arm, "ttft_s")), found.get((name, arm, primary(name)))) for arm in arms]
    kept = [(arm, time.value, mark) for arm, time, mark in points if time is not None and mark is not None]
    if not kept:
        return _page(f"{name}: no arm was timed", [])
    across = _axis([1000 * time for _, time, _ in kept], LEFT, WIDTH - RIGHT)
    up = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    parts = _frame(across, up, "time to the first token, ms (segments encoded before)", "per cent")
    for number, (arm, time, mark) in enumerate(kept):
        parts += _point(across.at(1000 * time), up, mark, arm, COLOURS[number % len(COLOURS)], number)
    return _page(f"{name}: {primary(name).replace('_', ' ')} against time to the first token", parts)


def drift_by_depth(found: Sequence[Drift]) -> str:
    """The state's error of every arm by layer, on a logarithmic axis."""
    lines = [(d.arm, [(x.layer, x.state) for x in d.layers if x.state]) for d in found]
    values = [value for _, line in lines for _, value in line if value]
    if not values:
        return _page("drift: the model keeps no state", [])
    across = Axis(0.0, float(max(1, len(found[0].layers) - 1)), LEFT, WIDTH - RIGHT)
    up = _axis(values, HEIGHT - BOTTOM, TOP)
    parts = _frame(across, up, "layer", "relative error of the state")
    for number, (arm, line) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across.at(layer):.1f},{up.at(value):.1f}" for layer, value in line if value)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 16 * number + 8, arm, colour))
    return _page("error of the composed state by depth", parts)


def _axis(values: Sequence[float], start: float, stop: float) -> Axis:
    """From the step below the values to the one above them."""
    low, high = min(values), max(values)
    steps = STEPS if high <= FEW / 4 * low else (1.0,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    found = [step * 10.0**n for n in powers for step in steps]
    bottom, top = max(v for v in found if v <= low * 1.001), min(v for v in found if v > high)
    return Axis(bottom, top, start, stop, log=True)


def _point(x: float, up: Axis, mark: Record, arm: str, colour: str, number: int) -> list[str]:
    y = up.at(100 * mark.value)
    # Later ones are smaller, so that points on top of each other all show.
    radius = max(2.5, 7.0 - 0.5 * number)
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{escape(arm)}</title></circle>']
    if mark.low is not None and mark.high is not None:
        ends = f'y1="{up.at(100 * mark.low):.1f}" y2="{up.at(100 * mark.high):.1f}"'
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends} stroke="{colour}"/>')
    return [*parts, _text(WIDTH - RIGHT + 12, TOP + 16 * number + 8, arm, colour)]


def _frame(across: Axis, up: Axis, below: str, beside: str) -> list[str]:
    parts = [f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>']
    for value in across.ticks():
        parts.append(_text(across.at(value), HEIGHT - BOTTOM + 18, _number(value), "#444", "middle"))
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, _number(value), "#444", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, below, "#222", "middle"))
    parts.append(_text(12, TOP - 10, beside, "#222"))
    return parts


def _number(value: float) -> str:
    return f"{value:g}" if value >= 0.01 or value == 0 else f"{value:.0e}"


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(title: str, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><title>{escape(title)}</title>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>"]) + "\n"
