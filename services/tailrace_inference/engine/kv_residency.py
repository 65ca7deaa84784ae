"""KV residency: waiting calls, running rows, kept prefixes and free blocks.

Invariants: each block has one owner, also where calls share a prompt (`prompts`); when blocks run out,
kept prefixes are evicted first (least recently kept), then the newest running call returns to the head
of the queue with its tokens and is computed again later, so that the oldest call always advances; a
prefix of an older policy version is never reused unless the configuration is `keep`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from tailrace_inference.engine.batch import Batch, EngineCall
from tailrace_inference.engine.kv_cache import BlockPool, Int64Array, KVCache
from tailrace_inference.engine.planner import share_budget
from tailrace_inference.engine.prefix import Prefix, PrefixStore, common_length
from tailrace_inference.engine.prompts import PromptOwners

Tokens = TypeVar("Tokens", int, Int64Array)


class KVResidency:
    """Moves calls between the queue and the rows of a `Batch`, and blocks between their owners."""

    def __init__(
        self,
        batch: Batch,
        cache: KVCache,
        pool: BlockPool,
        waiting: deque[EngineCall],
        keep_prefixes: bool,
        before_preemption: Callable[[int], None],
    ) -> None:
        self.batch = batch
        self.waiting = waiting
        self.prefixes = PrefixStore()
        self.pool = pool
        self.num_preemptions = 0
        self.num_preempted_tokens = 0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self._cache = cache
        self._keep_prefixes = keep_prefixes
        self._before_preemption = before_preemption
        self._owners = PromptOwners(batch)

    def admit(self, policy_version: int, now_s: float) -> None:
        """Moves waiting calls into rows, first come first served, while there is room for their tokens.

        Calls whose prompt another row is computing wait until it is computed.
        """
        if not (self.waiting and self.batch.has_room):
            return
        rows = self.batch.active()
        promised = int((self._blocks_for(self.batch.length[rows]) - self.batch.num_blocks[rows]).sum())
        passed_over: list[EngineCall] = []
        while self.waiting and self.batch.has_room:
            call = self.waiting.popleft()
            owner = self._owners.row_of(call, policy_version) if self._keep_prefixes else None
            if owner is not None and not self._owners.has_computed(owner, call):
                passed_over.append(call)
                continue
            added = self._place(call, owner, promised, policy_version, now_s)
            if added is None:
                self.waiting.appendleft(call)
                break
            promised += added
        self.waiting.extendleft(reversed(passed_over))

    def _place(
        self, call: EngineCall, owner: int | None, promised: int, policy_version: int, now_s: float
    ) -> int | None:
        """Adds a call with its episode's prefix, or with a copy of the prompt in row `owner`.

        Returns the number of blocks that it still needs, None without room.
        """
        prefix = self.prefixes.take(call.episode_id)
        num_tokens = len(call.token_ids)
        matched = (
            0
            if prefix is None
            else min(common_length(prefix.token_ids, call.token_ids), num_tokens - 1)
        )
        kept = self._blocks_for(matched)
        lacking = self._blocks_for(num_tokens) - kept
        surplus = 0 if prefix is None else len(prefix.blocks) - kept
        if lacking + promised > self.pool.num_free + self.prefixes.num_blocks + surplus:
            if prefix is not None:
                self.prefixes.keep(call.episode_id, prefix)
            return None
        blocks, kv_version = np.empty(0, np.int64), policy_version
        if prefix is not None:
            self.pool.give(prefix.blocks[kept:])
            if kept:
                blocks, kv_version = prefix.blocks[:kept], prefix.policy_version
        if not matched and owner is not None:
            matched = num_tokens - 1
            blocks = self._copied(owner, self._blocks_for(matched))
            lacking -= len(blocks)
        if call.num_seen == 0:
            call.num_cached = matched
            self.num_hit_tokens += matched
            self.num_prompt_tokens += num_tokens
        self.batch.add(call, blocks, matched, kv_version, now_s)
        self._owners.add(call)
        return lacking

    def _copied(self, owner: int, count: int) -> Int64Array:
        """Copies the first `count` blocks of a row; there is room for them."""
        while self.pool.num_free < count:
            self.pool.give(self.prefixes.evict())
        blocks = self.pool.take(count)
        self._cache.copy(self.batch.table[owner, :count], blocks)
        return blocks

    def schedule(self, max_tokens: int, max_recomputed: int) -> tuple[Int64Array, Int64Array]:
        """Rows [R] of the next step and their new tokens [R]; allocates the blocks for them.

        `max_recomputed`: tokens of a step beside those that decode, while rows are computed again.
        """
        while True:
            rows = self.batch.active()
            computed = self.batch.computed[rows]
            recomputed = self.batch.seen[rows] > computed
            pending = self.batch.length[rows] - computed
            take = share_budget(pending, max_tokens, recomputed, max_recomputed)
            chosen = take > 0
            rows, take = rows[chosen], take[chosen]
            wanted = self._blocks_for(self.batch.computed[rows] + take) - self.batch.num_blocks[rows]
            if self._make_room(int(np.maximum(wanted, 0).sum())):
                break
        grows = wanted > 0
        if grows.any():
            blocks = self.pool.take(int(wanted[grows].sum()))
            self._cache.zero(blocks)
            self.batch.extend(rows[grows], wanted[grows], blocks)
        return rows, take

    def _make_room(self, num_blocks: int) -> bool:
        """Frees blocks by eviction; False after a preemption, since the needs have changed then."""
        while self.pool.num_free < num_blocks and len(self.prefixes):
            self.pool.give(self.prefixes.evict())
        if self.pool.num_free >= num_blocks:
            return True
        assert len(self.batch) > 1, "a single call always fits"
        self.num_preemptions += 1
        row = self.batch.newest
        self.num_preempted_tokens += int(self.batch.computed[row])
        self._before_preemption(row)
        self.batch.keep_tokens(row)
        self.pool.give(self.batch.release(row))
        self.waiting.appendleft(self._free(row))
        return False

    def _free(self, row: int) -> EngineCall:
        self._owners.remove(row)
        return self.batch.remove(row)

    def finish(self, row: int) -> None:
        """Frees a row; its computed tokens stay as the prefix of its episode."""
        batch = self.batch
        computed = int(batch.computed[row])
        blocks = batch.release(row)
        if self._keep_prefixes and computed:
            used = self._blocks_for(computed)
            prefix_ids = batch.tokens[row, :computed].copy()
            prefix = Prefix(prefix_ids, blocks[:used], int(batch.kv_version[row]))
            episode_id = batch.call(row).episode_id
            self.pool.give(self.prefixes.keep(episode_id, prefix))
            blocks = blocks[used:]
        self.pool.give(blocks)
        self._free(row)

    def release(self, episode_ids: Iterable[str]) -> None:
        """Frees the kept prefixes of these episodes; their running calls are not touched."""
        for episode_id in episode_ids:
            prefix = self.prefixes.take(episode_id)
            if prefix is not None:
                self.pool.give(prefix.blocks)

    def forget_computed(self, policy_version: int) -> None:
        """Drops all keys and values; running calls keep their rows and are computed again."""
        self.pool.give(self.prefixes.clear())
        for row in self.batch.active().tolist():
            self.pool.give(self.batch.release(row))
            self.batch.kv_version[row] = policy_version

    def _blocks_for(self, num_tokens: Tokens) -> Tokens:
        return -(-num_tokens // self._cache.block_tokens)
