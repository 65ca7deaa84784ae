"""What can be wrong with what a caller asks of a ledger."""

from __future__ import annotations


class UnknownCompletionError(KeyError):
    """No recorded call has this id. Attributes: `completion_id`, `num_calls` (recorded ones)."""

    def __init__(self, completion_id: str, num_calls: int) -> None:
        super().__init__(completion_id)
        self.completion_id = completion_id
        self.num_calls = num_calls

    def __str__(self) -> str:
        name = f"call {self.completion_id!r}" if self.completion_id else "last call"
        return f"the ledger has no {name}: {self.num_calls} calls are recorded; use the id of one"
