"""Decode steps as CUDA graphs: one launch for what are some thousand kernels.

A step in which every row computes one token is padded to a size of a ladder, in rows and in blocks of
the longest row, and the graph of that size is replayed. Graphs are recorded when their size first
occurs. A large step is left to plain launches: it keeps the device busy longer than these take.

Invariants: padding reads and writes the spare block alone; no graph outlives the memory that it names
(`forget`: the cache and the weights move in a sleep).
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailrace_inference.engine.attention import AttentionStep, Group
from tailrace_inference.engine.forward_check import Forward
from tailrace_inference.engine.kv_cache import Int64Array, KVCache

Compute = Callable[[], None]

# Rows and blocks of graphs: few sizes of blocks, since each goes with every size of rows.
_ROWS = sorted({(2 + odd) << power >> 1 for power in range(13) for odd in (0, 1)})
_BLOCKS = [1 << power for power in range(32)]
_MAX_BLOCKS = 8192  # of all rows of a graph
_STREAM: Any = torch.cuda.Stream  # has no types


class _Graph(NamedTuple):
    inputs: Tensor  # ids [R], positions [R], slots [R] and blocks [R * B], one after the other
    replay: Compute


def _cuda_graph(compute: Compute, pool: Any) -> Compute:
    """Records `compute` after a run on the same stream; other threads may go on with theirs."""
    aside, graph = _STREAM(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()  # libraries load, choose and allocate in the first run
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            compute()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(aside)
    replay: Compute = graph.replay
    return replay


# By type of device; tests add one for the CPU.
RECORDERS: dict[str, Callable[[Compute, Any], Compute]] = {"cuda": _cuda_graph}


class DecodeGraphs:
    """Graphs of one forward and one cache. `spare_block` of the cache belongs to no row."""

    def __init__(
        self, forward: Forward, cache: KVCache, spare_block: int, max_running: int, like: Tensor
    ) -> None:
        """`like` [vocabulary, H]: output matrix, for size and type of the logits."""
        self._forward = forward
        self._cache = cache
        self._spare_block = spare_block
        max_rows = _next_of(_ROWS, min(max_running, _ROWS[-1]))
        self._logits = like.new_empty((max_rows, len(like)))
        self._each = torch.arange(max_rows, device=like.device)
        self._record = RECORDERS[like.device.type]
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.forget()

    def forget(self) -> None:
        """Drops all graphs, and their memory."""
        self._graphs.clear()
        # torch ends a pool with the last graph in it.
        self._pool = torch.cuda.graph_pool_handle() if self._logits.is_cuda else None

    def logits(
        self, ids: Int64Array, positions: Int64Array, slots: Int64Array, table: Int64Array
    ) -> Tensor | None:
        """Logits [R, vocabulary] after ids [R], valid until the next call; None: no graph serves it.

        Row r writes its keys at `slots` [R] and reads blocks `table` [R, B].
        """
        if len(ids) > len(self._each):
            return None
        rows, blocks = _next_of(_ROWS, len(ids)), _next_of(_BLOCKS, table.shape[1])
        if rows * blocks > _MAX_BLOCKS:
            return None
        graph = self._graphs.get((rows, blocks))
        if graph is None:
            graph = self._graphs[rows, blocks] = self._made(rows, blocks)
        given = np.zeros(rows * (3 + blocks), np.int64)
        of_ids, of_positions, of_slots, of_table = np.split(given, (rows, 2 * rows, 3 * rows))
        of_ids[: len(ids)], of_positions[: len(ids)] = ids, positions
        of_slots[:] = self._spare_block * self._cache.block_tokens
        of_slots[: len(ids)] = slots
        padded = of_table.reshape(rows, blocks)
        padded[len(ids) :, 0] = self._spare_block
        padded[: len(ids), : table.shape[1]] = table
        graph.inputs.copy_(torch.from_numpy(given))
        graph.replay()
        return self._logits[: len(ids)]

    def _made(self, rows: int, blocks: int) -> _Graph:
        """A graph, recorded on padding alone."""
        inputs = torch.zeros(rows * (3 + blocks), dtype=torch.int64, device=self._each.device)
        ids, positions, slots, table = torch.split(inputs, [rows, rows, rows, rows * blocks])
        slots.fill_(self._spare_block * self._cache.block_tokens)
        table.fill_(self._spare_block)

        def compute() -> None:
            group = Group(0, rows, rows, 1, table, positions.unsqueeze(1), None, None)
            step = AttentionStep(self._cache, slots, [group])
            found = self._forward.logits(ids, positions, self._each[:rows], step)
            self._logits[:rows].copy_(found)

        return _Graph(inputs, self._record(compute, self._pool))


def _next_of(sizes: list[int], size: int) -> int:
    """The least of `sizes` that is not below `size`."""
    return sizes[bisect_left(sizes, size)]
