"""Plan of a step: new tokens of each row, and attention groups of rows. Pure numpy.

Invariants: a step never computes more tokens than its budget; rows that decode come first, so that a
long prompt never stalls running answers; each row of a plan is in exactly one group.
"""

from typing import NamedTuple

import numpy as np

from tailrace_inference.engine.kv_cache import BoolArray, Int64Array

# Padding, in blocks of keys, that costs less than one more attention call per layer.
_CHEAP_PADDING_BLOCKS = 24
# Tokens of a step while rows are computed again: as few as the device computes at nearly full speed.
MAX_RECOMPUTED_TOKENS = {"cpu": 128, "cuda": 4096}
# Largest mask of one attention call: queries times keys.
_MAX_GROUP_SCORES = 1 << 24


class GroupRange(NamedTuple):
    """Consecutive rows of a plan that attend together."""

    first_row: int
    last_row: int
    num_queries: int  # largest number of new tokens among the rows
    num_blocks: int  # largest number of blocks among the rows


class StepPlan(NamedTuple):
    """One step of R rows and T flat tokens; rows are in the order of their groups."""

    rows: Int64Array  # [R]
    take: Int64Array  # [R] new tokens of each row
    start: Int64Array  # [R] position of each row's first new token
    first: Int64Array  # [R] flat index of each row's first new token
    token_rows: Int64Array  # [T]
    positions: Int64Array  # [T]
    groups: list[GroupRange]


def share_budget(
    pending: Int64Array, max_tokens: int, recomputed: BoolArray | None = None, max_recomputed: int = 0
) -> Int64Array:
    """New tokens per row [R]: 1 for rows that decode, the rest of the budget for prompts in order.

    While there are rows to be `recomputed` [R], as after an update of the weights, these come first,
    the shortest before the others. If no row decodes, a step computes the shortest alone, else at most
    `max_recomputed` tokens beside those that decode: so the first rows answer soon, not all of them
    late.
    """
    decodes = pending == 1
    prompts = np.where(decodes, 0, pending)
    left = max_tokens - int(np.count_nonzero(decodes))
    if recomputed is None or not recomputed.any():
        before = np.cumsum(prompts) - prompts
    else:
        left = min(left, max_recomputed if decodes.any() else int(prompts[recomputed].min()))
        order = np.lexsort((np.where(recomputed, prompts, 0), ~recomputed))
        before = np.empty_like(prompts)
        before[order] = np.cumsum(prompts[order]) - prompts[order]
    return np.where(decodes, 1, np.clip(left - before, 0, prompts))


def plan_step(
    rows: Int64Array, take: Int64Array, start: Int64Array, block_tokens: int, max_blocks: int
) -> StepPlan:
    """Orders rows [R], which compute `take` [R] > 0 tokens from `start` [R], into groups.

    One attention call gathers at most `max_blocks`, unless it has a single row.
    """
    blocks = -(-(start + take) // block_tokens)
    order, groups = form_groups(take, blocks, block_tokens, max_blocks)
    rows, take, start = rows[order], take[order], start[order]
    end = np.cumsum(take)
    first = end - take
    positions = np.arange(end[-1]) + np.repeat(start - first, take)
    return StepPlan(rows, take, start, first, np.repeat(rows, take), positions, groups)


def form_groups(
    take: Int64Array, blocks: Int64Array, block_tokens: int, max_blocks: int
) -> tuple[Int64Array, list[GroupRange]]:
    """Order of the rows, and groups of neighbours; padding never doubles the queries of a row."""
    order = np.lexsort((-blocks, -take))
    falling = take[order]
    groups: list[GroupRange] = []
    first = 0
    while first < len(order):
        most = int(falling[first])
        alike = (falling == 1) if most == 1 else (falling * 2 > most) & (falling > 1)
        last = first + int(np.count_nonzero(alike[first:]))
        rows = order[first:last]
        rows[:] = rows[np.argsort(-blocks[rows], kind="stable")]
        max_keys = _MAX_GROUP_SCORES // (most * block_tokens)
        for start, end in _split(blocks[rows], min(max_blocks, max_keys)):
            inside = rows[start:end]
            queries, keys = int(take[inside].max()), int(blocks[inside[0]])
            groups.append(GroupRange(first + start, first + end, queries, keys))
        first = last
    return order, groups


def _split(blocks: Int64Array, max_blocks: int) -> list[tuple[int, int]]:
    """Ranges of rows with falling `blocks` [n] that attend together.

    A range is cut where the cut saves most padding, if it saves more than a call costs.
    """
    ranges: list[tuple[int, int]] = []
    pending = [(0, len(blocks))]
    while pending:
        first, last = pending.pop()
        most = int(blocks[first])
        fits = max(1, max_blocks // most)  # a single row is never split
        saved = (most - blocks[first:last]) * np.arange(last - first, 0, -1)
        cut = int(saved.argmax())
        if saved[cut] <= _CHEAP_PADDING_BLOCKS:
            cut = fits if last - first > fits else 0
        if cut:
            pending += [(first + cut, last), (first, first + cut)]
        else:
            ranges.append((first, last))
    return ranges
