"""What an engine itself has to encode, as a planner sees it: a queue in seconds, and what has not been begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypic.engine.admission import Admission
from hypic.engine.encode import Encode
from hypic.engine.parallel.assign import Job, Member
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import NO_LINK, Pace
from hypic.engine.parallel.progress import num_begun
from hypic.engine.parallel.view import View


@dataclass
class OwnWork:
    """On the engine's thread, between two steps, while the engine runs: ``admission`` is taken away when it ends."""

    me: Self
    pace: Pace
    admission: Admission | None

    @property
    def encoding(self) -> Mapping[bytes, Encode]:
        assert self.admission is not None, "work is planned while the engine runs"
        return self.admission.encoding

    def member(self, receive_s: float, fresh: Sequence[Encode] = ()) -> Member:
        """This engine and all that it has to encode, but for what is ``fresh``."""
        new = {job.entry.key for job in fresh}
        queued_s = self.pace.cost.together_s([job.num_left for job in self.here() if job.entry.key not in new])
        return Member(self.me.rank, self.pace.cost, NO_LINK, queued_s, self.me.device_kind, receive_s)

    def here(self) -> list[Encode]:
        """What is encoded here, in this order."""
        return [job for job in self.encoding.values() if not job.away]

    def later(self) -> list[Encode]:
        """What the next step does not hold; what others ask for is not passed on, whoever else waits for it."""
        here = self.here()
        first = num_begun([job.num_left for job in here], self.pace.cost.batch_tokens)
        return [job for job in here[first:] if not job.is_asked]


def job_of(number: int, job: Encode, view: View, ranks: Sequence[int]) -> Job:
    """An encode as a planner sees it, with those of ``ranks`` that are thought to hold its entry."""
    entry = job.entry
    return Job(number, len(entry.ids), entry.num_bytes, view.holders(entry.key.hex(), ranks))
