"""What an idle combiner takes back of the work that it gave to a slower peer: pure, in seconds.

A plan goes by costs that may be wrong. When a worker has nothing left to encode and a peer has segments of the same
requests that it cannot have begun (those behind its present step, ``progress.py``), some of them change hands, as in
work stealing (Blumofe and Leiserson 1999), but asked of the peer by a message that may come too late: then a segment
is encoded twice and the second answer is dropped. So it is done only for a clear gain, with the way of what the peer
has made counted, and never for what it may have begun: not even if that is a little late. The other way, segments that
wait here while a peer is idle are simply planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypic.engine.parallel.assign import OTHER_KIND, Member, alike
from hypic.engine.parallel.progress import Progress, num_begun
from hypic.engine.parallel.view import View
from hypic.engine.parallel.wants import Pending

# Nothing changes hands for less than this share of the time that it would take as it is: costs are no better known.
WORTH_SHARE = 0.2


@dataclass(frozen=True)
class Left:
    """What a peer still owes: entries that are made and on their way, and tokens of what it makes, in the order in
    which it was asked, in a step that began ``elapsed_s`` ago; an entry is of ``num_bytes``."""

    num_leaving: int
    num_tokens: Sequence[int]
    elapsed_s: float
    num_bytes: int = 0


def num_to_take(left: Left, peer: Member, own: Member) -> int:
    """How many of the last of these segments are better encoded here."""
    num_sure, left_s = _present(left, peer)
    rest = left.num_tokens[num_sure:]

    def ends_s(taken: int) -> float:
        kept, mine = rest[: len(rest) - taken], rest[len(rest) - taken :]
        num_coming = left.num_leaving + num_sure + len(kept)
        there_s = _last_comes_s(left, peer, num_sure, left_s, kept)
        return max(own.encode.together_s(mine) + num_coming * own.receive_s, there_s)

    best = min(range(len(rest) + 1), key=lambda taken: (ends_s(taken), taken))
    return best if ends_s(best) < (1 - WORTH_SHARE) * ends_s(0) else 0


def _present(left: Left, peer: Member) -> tuple[int, float]:
    """How many may be made or begun, and seconds until the peer is done with them.

    One that should have ended its step, but not long ago, is taken to be at the next one, whose first entry is still
    on its way. One that is later than that is slow.
    """
    batch = peer.encode.batch_tokens
    begun = num_begun(left.num_tokens, batch)
    step_s = peer.step_s(left.num_tokens[:begun])
    late_s = left.elapsed_s - step_s
    if late_s <= 0:
        return begun, -late_s
    if left.elapsed_s > OTHER_KIND * (step_s + (left.num_leaving + 1) * peer.link.seconds(left.num_bytes)):
        return begun, 0.0
    following = num_begun(left.num_tokens[begun:], batch)
    return begun + following, max(0.0, peer.step_s(left.num_tokens[begun : begun + following]) - late_s)


def _last_comes_s(left: Left, peer: Member, num_sure: int, left_s: float, kept: Sequence[int]) -> float:
    """Seconds until the last of what a peer makes is here."""
    way_s = peer.link.seconds(left.num_bytes)
    made_s, free_s = left_s, left.num_leaving * way_s
    free_s = max(free_s, made_s) + num_sure * way_s
    while kept:
        count = num_begun(kept, peer.encode.batch_tokens)
        made_s += peer.step_s(kept[:count])
        free_s, kept = max(free_s, made_s) + count * way_s, kept[count:]
    return free_s


def owed(progress: Progress, num_bytes: int, now: float) -> Left:
    return Left(len(progress.leaving), list(progress.making.values()), now - progress.since_s, num_bytes)


def to_take_back(waiting: Sequence[Pending], own: Member, view: View, now: float) -> list[Pending]:
    """What ``own``, which is idle, takes back of what is awaited: of one peer, the first from which it is worth it."""
    by_peer: dict[tuple[int, int], dict[int, Pending]] = {}
    for pending in waiting:
        if not pending.is_fetch:
            by_peer.setdefault(pending.peer, {})[pending.nonce] = pending
    for id, asked in by_peer.items():
        peer = view.get(*id)
        if peer is None:
            continue
        peer.progress.keep(asked.keys())
        mine, theirs = alike([own, peer.member(now)])
        left = owed(peer.progress, max(pending.entry.num_bytes for pending in asked.values()), now)
        count = num_to_take(left, theirs, mine)
        if count:
            view.promises(id[0], theirs.step_s(left.num_tokens[:-count]), now)
            return [asked[nonce] for nonce in list(peer.progress.making)[-count:]]
    return []
