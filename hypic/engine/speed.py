"""How fast this model encodes, measured once at the start; what it writes is given back."""

from __future__ import annotations

import time

from hypic.engine.chain import Chain, RowLink
from hypic.engine.runner import Runner
from hypic.engine.sizing import Need

PROBE_TOKENS = 256


def measure_encode(runner: Runner, max_step_tokens: int) -> tuple[int, float]:
    """Tokens of one forward and the seconds it took; the first one, which compiles and allocates, does not count."""
    pool = runner.pool
    num = min(PROBE_TOKENS, max_step_tokens, runner.max_context, pool.capacity.pages * pool.page_size)
    if pool.lacks(Need(pool.pages_for(num), 1)):
        return 0, 0.0
    pages, state = pool.take_pages(pool.pages_for(num)), pool.take_state()
    slots, elapsed_s = pool.slots_of(pages, num), 0.0
    for _ in range(2):
        began = time.perf_counter()
        runner.run([Chain([RowLink([0] * num, 0, slots)], slots, 0, state)])
        elapsed_s = time.perf_counter() - began
    pool.drop_pages(pages)
    pool.drop_state(state)
    return num, elapsed_s
