"""Builder of one row: pieces of raw bytes, joined once.

Invariants: all three arrays have one length; a position is trained only if an engine sampled it, its
log-probability is finite and its call is not masked; all other positions have log-probability 0.
"""

from array import array
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tailrace.provenance import join_spans, kept_spans
from tailrace_protos.base import EMPTY, Int32Bytes, as_float32
from tailrace_protos.generation import TokenSpan
from tailrace_protos.session import LedgerNode
from tailrace_protos.trajectory import TokenRow


class RowBuilder:
    """Grows by inserted ids and by the sampled tokens of whole calls."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_mask",
        "_num_bytes",
        "_spans",
        "_turn_ends",
        "_turn_returns",
        "_turn_rewards",
    )

    def __init__(self) -> None:
        self._ids: list[bytes | memoryview] = []
        self._mask: list[bytes] = []
        self._logprobs: list[bytes | memoryview] = []
        self._turn_ends: list[int] = []
        self._turn_rewards: list[float] = []
        self._turn_returns: list[float] = []
        self._spans: list[TokenSpan] = []  # of all tokens with mask 1
        self._num_bytes = 0

    def insert(self, ids: bytes | Int32Bytes) -> None:
        """Appends ids [o] that this row does not train."""
        num_bytes = len(ids)
        self._ids.append(ids)
        self._mask.append(bytes(num_bytes // 4))
        self._logprobs.append(bytes(num_bytes))
        self._num_bytes += num_bytes

    def turn(self, node: LedgerNode, reward: float, turn_return: float | None = None) -> None:
        """Appends the sampled tokens [t] of a call that this row trains, with its turn's reward.

        A row has the returns of all its turns or of none.
        """
        token_ids = node.token_ids
        if node.is_masked:
            self.insert(token_ids)
        else:
            num_bytes = len(token_ids)
            self._ids.append(token_ids)
            self._mask.append(b"\1" * (num_bytes // 4))
            self._logprobs.append(node.inference_logprobs)
            self._spans += node.spans
            self._num_bytes += num_bytes
        self._turn_ends.append(self._num_bytes // 4)
        self._turn_rewards.append(reward)
        if turn_return is not None:
            self._turn_returns.append(turn_return)

    def row(
        self,
        reward: float,
        row_id: str = "",
        *,
        hashes: Sequence[int] = (),
        first_turn: int = -1,
        conversation: int = 0,
        has_reward: bool = True,
    ) -> TokenRow:
        """Builds the row; `reward` is the return credited to it, `hashes` name the observations."""
        mask, logprobs = b"".join(self._mask), b"".join(self._logprobs)
        spans = join_spans(self._spans)
        finite = np.isfinite(np.frombuffer(logprobs, np.float32))
        if not finite.all():
            is_sampled = np.frombuffer(mask, np.bool_)
            spans = kept_spans(spans, finite[is_sampled])
            mask = (is_sampled & finite).tobytes()
            logprobs = np.where(finite, np.frombuffer(logprobs, np.float32), np.float32(0)).tobytes()
        return TokenRow(
            token_ids=_view(b"".join(self._ids)),
            loss_mask=_view(mask),
            inference_logprobs=_view(logprobs),
            spans=spans,
            turn_ends=_packed("i", self._turn_ends),
            turn_rewards=_packed("f", self._turn_rewards),
            reward=reward,
            row_id=row_id,
            turn_hashes=_packed("q", hashes),
            first_turn=first_turn,
            turn_returns=_packed("f", self._turn_returns),
            conversation=conversation,
            has_reward=has_reward,
        )


def has_trained_tokens(node: LedgerNode) -> bool:
    """True if any sampled token of the call may be trained."""
    return not node.is_masked and bool(np.isfinite(as_float32(node.inference_logprobs)).any())


def _view(raw: bytes) -> memoryview:
    return memoryview(raw) if raw else EMPTY


def _packed(code: Literal["i", "f", "q"], values: Sequence[float]) -> memoryview:
    """Packs short lists; numpy takes longer to start than `array` takes to copy."""
    return memoryview(array(code, values)).cast("B") if values else EMPTY
