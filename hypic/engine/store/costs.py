"""What it costs to load an entry and to encode it anew, in seconds: measured at the start, kept up by observation."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.25


@dataclass
class Rate:
    """Seconds for so many units: a running mean in which the newest observation counts for a quarter."""

    unit_s: float | None = None

    def see(self, units: int, seconds: float) -> None:
        if units > 0 and seconds >= 0.0:
            found = seconds / units
            self.unit_s = found if self.unit_s is None else (1 - WEIGHT) * self.unit_s + WEIGHT * found

    def seconds(self, units: int) -> float | None:
        """``None`` before anything was seen."""
        return None if self.unit_s is None else self.unit_s * units


@dataclass
class Costs:
    """``encode`` per token, ``reads`` per byte of each tier, ``install`` per byte from the host to the device."""

    encode: Rate = field(default_factory=Rate)
    install: Rate = field(default_factory=Rate)
    reads: dict[str, Rate] = field(default_factory=dict)

    def see_read(self, tier: str, num_bytes: int, seconds: float) -> None:
        self.reads.setdefault(tier, Rate()).see(num_bytes, seconds)

    def load_s(self, tier: str, num_bytes: int, num_ahead: int = 0) -> float | None:
        """An entry from ``tier``, behind ``num_ahead`` bytes that it reads before; ``None`` if unknown."""
        install = self.install.seconds(num_bytes)
        read = self.reads[tier].seconds(num_bytes + num_ahead) if tier in self.reads else 0.0
        return None if install is None or read is None else read + install

    def objection(self, tier: str, num_bytes: int, num_tokens: int, num_ahead: int = 0) -> str:
        """Why an entry is better encoded than loaded, or nothing if it is not, or if too little is known."""
        load_s, encode_s = self.load_s(tier, num_bytes, num_ahead), self.encode.seconds(num_tokens)
        if load_s is None or encode_s is None or load_s <= encode_s:
            return ""
        return f"cheaper to encode: {tier} {_milliseconds(load_s)} > encode {_milliseconds(encode_s)}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
