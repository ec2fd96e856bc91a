"""How to train, how far a training is, and the learning rate that follows from both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How to train. ``minutes`` bounds this call, ``total_minutes`` the whole training; with ``reuse`` exams are
    answered through segments too."""

    minutes: float
    total_minutes: float
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    decay_share: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    num_workers: int = 12
    seed: int = 1
    compiled: bool = True
    graphed: bool = True
    exam_every_s: float = 90.0
    log_every: int = 50
    reuse: bool = False


@dataclass
class Progress:
    """How far training is; saved with the weights."""

    step: int = 0
    trained_s: float = 0.0
    tokens: int = 0
    spoilt: int = 0

    def share(self, settings: Settings) -> float:
        """The share of the whole training time that is over."""
        return self.trained_s / (60.0 * settings.total_minutes)


def learning_rate(settings: Settings, step: int, share: float) -> float:
    """Warm-up by steps, then flat, then linear to 0 over the last ``decay_share`` of the time."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    left = min(1.0, max(0.0, 1.0 - share) / settings.decay_share)
    return settings.learning_rate * warm * left
