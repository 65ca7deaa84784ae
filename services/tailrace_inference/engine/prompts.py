"""Shared prompts, such as those of a group: one call computes them, the others copy.

The first call that gets a row computes the prompt. Other calls with the same prompt wait, then copy its
keys and values, so that each block keeps one owner. Only keys and values of the current policy version
are copied.
"""

from hashlib import blake2b

from tailrace_inference.engine.batch import Batch, EngineCall

# Computing a shorter prompt is faster than waiting for it.
MIN_PROMPT_TOKENS = 8


class PromptOwners:
    """Rows that computed or will compute a prompt, by the 128-bit digest of the prompt."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def row_of(self, call: EngineCall, policy_version: int) -> int | None:
        """The row that holds the call's whole prompt under the current weights."""
        if not _can_share(call):
            return None
        row = self._rows.get(_key(call))
        is_current = row is not None and self._batch.kv_version[row] == policy_version
        return row if is_current else None

    def has_computed(self, row: int, call: EngineCall) -> bool:
        """True if the row has computed the call's prompt up to its last token."""
        return bool(self._batch.computed[row] >= call.num_prompt - 1)

    def add(self, call: EngineCall) -> None:
        """Makes the call's row the owner of its prompt, unless another owner's weights are as new."""
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
        """Removes a row; it owns no prompt then."""
        key = self._keys.pop(row, None)
        if key is not None:
            del self._rows[key]


def _can_share(call: EngineCall) -> bool:
    """True if the call's tokens are a prompt that is not computed yet and long enough to share."""
    return call.num_seen == 0 and len(call.token_ids) == call.num_prompt >= MIN_PROMPT_TOKENS


def _key(call: EngineCall) -> bytes:
    if call.prompt_key is None:
        call.prompt_key = blake2b(call.token_ids.tobytes(), digest_size=16).digest()
    return call.prompt_key
