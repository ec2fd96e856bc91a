"""Packing chains into index tensors, against a walk over every chain token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine.batch import CHUNK_SIZES, Batch, Chain, FoldInto, InteriorLink, RowLink, chunk_sizes_for

CPU = torch.device("cpu")
Links = list[RowLink | InteriorLink]


def row(num_tokens: int, position: int, snapshot: int | None = None, fold: FoldInto | None = None) -> RowLink:
    ids = list(range(1000 + position, 1000 + position + num_tokens))
    return RowLink(ids, position, np.arange(position, position + num_tokens) + 5000, snapshot, fold)


def chain(links: Links, num_context: int, initial: int, final: int, wants_logits: bool = False) -> Chain:
    return Chain(links, np.arange(num_context) + 5000, initial, final, wants_logits)


def test_tokens_stand_in_chain_order() -> None:
    first = chain([row(3, 0), InteriorLink(7, 2, 4, 3), row(2, 7)], 9, 0, 1, wants_logits=True)
    second = chain([row(1, 20)], 21, 2, 2)
    third = chain([row(2, 5)], 7, 3, 3, wants_logits=True)
    batch = Batch.pack([first, second, third], 4, CPU)
    assert batch.positions.tolist() == [0, 1, 2, 7, 8, 20, 5, 6]
    assert batch.ids.tolist() == [1000, 1001, 1002, 1007, 1008, 1020, 1005, 1006]
    assert batch.kv_slots.tolist() == [p + 5000 for p in batch.positions.tolist()]
    assert batch.chain_tokens == (slice(0, 5), slice(5, 6), slice(6, 8)) and batch.num_tokens == 8
    assert batch.final.tokens.tolist() == [4, 7]
    assert [len(context.blocks) for context in batch.final.contexts] == [1, 0, 1]
    assert not batch.is_decode and Batch.pack([second, second], 4, CPU).is_decode


@pytest.mark.parametrize("links", [[row(2, 3)], [row(1, 3, snapshot=4)], [row(1, 3, fold=FoldInto(4, 1, 0))]])
def test_only_single_tokens_without_effects_are_decoded(links: Links) -> None:
    assert not Batch.pack([chain(links, 5, 1, 1)], 4, CPU).is_decode
    assert not Batch.pack([chain([InteriorLink(7, 2, 4, 0), row(1, 4)], 5, 1, 1)], 4, CPU).is_decode


def test_masks_are_causal_by_position() -> None:
    batch = Batch.pack([chain([row(2, 0), InteriorLink(7, 2, 3, 2), row(2, 5)], 7, 0, 1)], 4, CPU)
    (block,) = batch.contexts[0].blocks
    assert block.num_keys == 7 and not block.is_causal and block.mask is not None
    seen = [[key for key in range(7) if block.mask[query, key]] for query in range(4)]
    assert seen == [[0], [0, 1], list(range(6)), list(range(7))]
    whole = Batch.pack([chain([row(5, 0)], 5, 0, 1)], 4, CPU).contexts[0].blocks
    assert [(block.is_causal, block.mask) for block in whole] == [(True, None)]
    one = Batch.pack([chain([row(1, 6)], 7, 2, 2)], 4, CPU).contexts[0].blocks
    assert [(block.is_causal, block.mask, block.num_keys) for block in one] == [(False, None, 7)]


def test_long_rows_are_asked_in_blocks() -> None:
    batch = Batch.pack([chain([row(300, 3)], 303, 1, 1)], 4, CPU)
    blocks = batch.contexts[0].blocks
    assert [block.tokens for block in blocks] == [slice(0, 128), slice(128, 256), slice(256, 300)]
    assert [block.num_keys for block in blocks] == [131, 259, 303]
    shapes = [tuple(block.mask.shape) for block in blocks if block.mask is not None]
    assert shapes == [(128, 131), (128, 259), (44, 303)]


def test_keys_stand_where_they_are_told_to() -> None:
    positions = np.asarray([0, 1, 0, 1, 4, 5])
    links: Links = [row(2, 0), InteriorLink(7, 2, 2, 2), row(1, 4)]
    told = Chain(links, np.arange(5), 0, 1, key_positions=positions)
    assert Batch.pack([told], 4, CPU).contexts[0].key_positions.tolist() == [0, 1, 0, 1, 4]
    plain = Chain(links, np.arange(5), 0, 1)
    assert Batch.pack([plain], 4, CPU).contexts[0].key_positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lengths", [[1], [8] * 30, [16, 3], [1, 1, 1]])
def test_short_rows_are_padded_as_little_as_can_be(lengths: list[int]) -> None:
    assert chunk_sizes_for(lengths) == CHUNK_SIZES[:1]


# -- against a walk --------------------------------------------------------------------------------------------------


class Random:
    """Random chains: encodes (first runs of an interior or later pieces of it), then requests that read entries."""

    def __init__(self, seed: int) -> None:
        self.rng, self.slot = random.Random(seed), 0
        self.chains: list[Chain] = []
        encoded = [self.encode() for _ in range(self.rng.randint(0, 3))]
        stored = [InteriorLink(self.new(), self.slot, self.rng.randint(1, 7), 0) for _ in range(2)]
        for _ in range(self.rng.randint(1, 3)):
            self.request([*encoded, *stored])

    def new(self) -> int:
        self.slot += 1
        return self.slot

    def encode(self) -> InteriorLink:
        rng, seam = self.rng, self.rng.randint(0, 4)
        done = rng.choice([0, 0, 1, 5])
        fold = FoldInto(self.new(), self.slot, done)
        num = rng.randint(1, 9)
        head: Links = [row(seam, 0)] if seam and not done else []
        state = self.new()
        links = [*head, row(num, seam + done, fold=fold)]
        self.chains.append(chain(links, seam + done + num, state if done else 0, state))
        return InteriorLink(fold.state_slot, fold.transition_slot, done + num, 0)

    def request(self, entries: list[InteriorLink]) -> None:
        rng, links, position = self.rng, [], 0
        state, starts = self.new(), rng.random() < 0.5
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.5:
                entry = rng.choice(entries)
                links.append(InteriorLink(entry.state_slot, entry.transition_slot, entry.num_tokens, position))
                position += entry.num_tokens
            num = rng.randint(1, 70 if rng.random() < 0.2 else 5)
            links.append(row(num, position, self.new() if rng.random() < 0.3 else None))
            position += num
        self.chains.append(chain(links, position, 0 if starts else state, state, True))


def walked(chains: list[Chain], width: int, tails: Tensor, tokens: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Windows ``[N, W]`` of raw inputs behind every token and the tails written, one token at a time."""
    width -= 1
    stored = {slot: tails[slot] for slot in range(len(tails))}
    lengths: dict[int, int] = {}
    windows, written, token = [], {}, 0
    for one in chains:
        history = [torch.zeros(())] * width if one.initial_slot == 0 else list(stored[one.initial_slot])
        for link in one.links:
            if isinstance(link, InteriorLink):
                kept = min(width, link.num_tokens)
                history += list(stored[link.state_slot])[width - kept :]
                continue
            fresh = []
            for _ in link.ids:
                windows.append(torch.stack([*history[len(history) - width :], tokens[token]]))
                history.append(tokens[token])
                fresh.append(tokens[token])
                token += 1
            if link.fold is not None:
                slot = link.fold.state_slot
                before = list(stored[slot])[width - min(width, link.fold.num_done) :] if width else []
                tail = [*before, *fresh][-width:] if width else []
                lengths[slot] = len(tail)
                written[slot] = stored[slot] = torch.stack([torch.zeros(())] * (width - len(tail)) + tail)
            if link.snapshot_slot is not None:
                written[link.snapshot_slot] = torch.stack(history[len(history) - width :])
        written[one.final_slot] = torch.stack(history[len(history) - width :])
        stored = stored | {one.final_slot: written[one.final_slot]}
    return torch.stack(windows), written


@pytest.mark.parametrize("width", [2, 4, 5])
def test_convolutions_see_what_precedes_in_the_chain(width: int) -> None:
    for seed in range(60):
        made = Random(seed)
        batch = Batch.pack(made.chains, width, CPU)
        tokens, tails = torch.randn(batch.num_tokens), torch.randn(made.slot + 1, width - 1)
        tails[0] = 0.0
        plan = batch.conv
        table = torch.cat([tokens, tails[plan.tail_slots].reshape(-1), torch.zeros(1)])
        packed = table[plan.sources].unfold(0, width, 1)
        windows, written = walked(made.chains, width, tails, tokens)
        assert torch.equal(packed[plan.outputs], windows)
        assert sorted(plan.write_slots.tolist()) == sorted(written)
        for slot, tail in zip(plan.write_slots.tolist(), table[plan.write_sources], strict=True):
            assert torch.equal(tail, written[slot])


def test_rows_of_very_different_lengths_are_cut_into_chunks_of_different_sizes() -> None:
    assert chunk_sizes_for([8] * 60 + [512] * 30) == (16, 32) and chunk_sizes_for([8] * 60 + [512] * 30, 128)[0] == 16
    assert len(chunk_sizes_for([8] * 3 + [40])) == 1


class Walked:
    """A plan's moves carried out on words in the place of states: what each place has seen, map by map."""

    def __init__(self, made: Random, batch: Batch) -> None:
        self.plan = plan = batch.scan
        names = [[("chunk", tuple(t for t in row.tolist() if t < batch.num_tokens)) for row in c] for c in plan.chunks]
        slots = zip(plan.interior_states.tolist(), plan.interior_origins.tolist(), strict=True)
        self.names = [*names, [("interior", slot) for slot in slots]]
        self.seen: dict[int, tuple[object, ...]] = {}
        for place, slot in zip(plan.starts.tolist(), plan.initial_slots.tolist(), strict=True):
            self.seen[place] = (slot,)
        for move in (*plan.encodes, *plan.requests):
            for n in range(move.num):
                assert move.after + n not in self.seen
                self.seen[move.after + n] = (*self.seen[move.before + n], self.names[move.source][move.row + n])

    def chunk_places(self) -> list[tuple[object, int]]:
        """What stands before every chunk, as the layer reads it: places in the sources' order."""
        return list(zip((name for source in self.names[:-1] for name in source), range(10**6), strict=False))


def test_scans_follow_each_chain_and_folds_each_interior() -> None:
    num_folds = num_sizes = 0
    for seed in range(60):
        made = Random(seed)
        batch = Batch.pack(made.chains, 4, CPU)
        scan, walked = batch.scan, Walked(made, batch)
        flat = torch.cat([chunks.reshape(-1) for chunks in scan.chunks])
        assert torch.equal(flat[scan.token_chunks], torch.arange(batch.num_tokens))
        assert int((flat == batch.num_tokens).sum()) == len(flat) - batch.num_tokens
        assert sorted(walked.seen) == list(range(scan.num_places))
        written = dict(zip(scan.write_slots.tolist(), scan.write_places.tolist(), strict=True))
        before, token, fold_maps = dict(walked.chunk_places()), 0, folded(walked)
        for one in made.chains:
            seen: tuple[object, ...] = (one.initial_slot,)
            for link in one.links:
                if isinstance(link, InteriorLink):
                    seen = (*seen, ("interior", (link.state_slot, link.origin)))
                    continue
                head, tokens = seen, list(range(token, token + len(link.ids)))
                token += len(link.ids)
                while tokens:
                    name = next(name for name in before if name[0] == "chunk" and name[1][:1] == tuple(tokens[:1]))
                    assert walked.seen[before[name]] == seen and tuple(tokens[: len(name[1])]) == name[1]
                    seen, tokens = (*seen, name), tokens[len(name[1]) :]
                if link.fold is not None:
                    num_folds += 1
                    maps, start, stop, slots, is_continued = fold_maps[link.fold.state_slot]
                    assert (walked.seen[start], walked.seen[stop]) == (head, seen) and maps == seen[len(head) :]
                    assert slots == link.fold.transition_slot and is_continued == (link.fold.num_done > 0)
                if link.snapshot_slot is not None:
                    assert walked.seen[written[link.snapshot_slot]] == seen
            assert walked.seen[written[one.final_slot]] == seen
        num_sizes += len(scan.chunks) > 1
    assert num_folds > 30 and num_sizes == 0


def test_long_and_short_rows_of_one_chain_are_walked_in_order() -> None:
    """The same with so many rows that two sizes of chunks pay."""
    links: Links = []
    for position in range(0, 60 * 64, 64):
        links += [row(8, position), row(56, position + 8)]
    batch = Batch.pack([chain(links, 60 * 64, 0, 1)], 4, CPU)
    assert len(batch.scan.chunks) == 2
    walked = Walked(Random(0), batch)
    final = walked.seen[int(batch.scan.write_places[0])]
    assert [token for _, tokens in final[1:] for token in tokens] == list(range(60 * 64))
    flat = torch.cat([chunks.reshape(-1) for chunks in batch.scan.chunks])
    assert torch.equal(flat[batch.scan.token_chunks], torch.arange(60 * 64))


def folded(walked: Walked) -> dict[int, tuple[tuple[object, ...], int, int, int, bool]]:
    """By state slot: the maps of a fold in order, the places before and behind them, and the rest of it."""
    plan = walked.plan
    maps: dict[int, tuple[object, ...]] = {}
    for factor in plan.factors:
        for n in range(factor.num):
            done = () if factor.is_first else maps[factor.column + n]
            maps[factor.column + n] = (*done, walked.names[factor.source][factor.row + n])
    columns = zip(plan.fold_states.tolist(), plan.fold_before.tolist(), plan.fold_after.tolist(),
                  plan.fold_transitions.tolist(), strict=True)  # fmt: skip
    return {
        state: (maps[column], start, stop, transition, column in plan.continued.tolist())
        for column, (state, start, stop, transition) in enumerate(columns)
    }
