"""Prompts that several calls have at once, as those of a group do: computed by one, copied by others.

The first call to get a row computes the prompt, and others with the same prompt wait for that; then
they copy its keys and values, so that every block keeps one owner. Only keys and values of the current
policy version are copied.
"""

from __future__ import annotations

from hashlib import blake2b

from tailrace_inference.engine.batch import Batch, EngineCall

# Shorter prompts are sooner computed than waited for.
MIN_PROMPT_TOKENS = 8


class PromptOwners:
    """The rows that computed a prompt, or are about to, by the prompt's 128-bit digest."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def row_of(self, call: EngineCall, policy_version: int) -> int | None:
        """The row that has the call's whole prompt among its tokens, by the current weights."""
        if not _can_share(call):
            return None
        row = self._rows.get(_key(call))
        is_current = row is not None and self._batch.kv_version[row] == policy_version
        return row if is_current else None

    def has_computed(self, row: int, call: EngineCall) -> bool:
        """Whether there is all to copy that the call can: its prompt but for the last token."""
        return bool(self._batch.computed[row] >= call.num_prompt - 1)

    def add(self, call: EngineCall) -> None:
        """The call got a row; if another one has its prompt by weights as new, that one stays."""
        if not _can_share(call):
            return
        key, versions = _key(call), self._batch.kv_version
        owner = self._rows.get(key)
        if owner is not None:
            if versions[owner] >= versions[call.row]:
                return
            self.remove(owner)
        self._rows[key], self._keys[call.row] = call.row, key

    def remove(self, row: int) -> None:
        """Nothing is to be copied from the row any more."""
        key = self._keys.pop(row, None)
        if key is not None:
            del self._rows[key]


def _can_share(call: EngineCall) -> bool:
    """Whether the call's tokens are a prompt that was never computed, and worth it."""
    return call.num_seen == 0 and len(call.token_ids) == call.num_prompt >= MIN_PROMPT_TOKENS


def _key(call: EngineCall) -> bytes:
    if call.prompt_key is None:
        call.prompt_key = blake2b(call.token_ids.tobytes(), digest_size=16).digest()
    return call.prompt_key
