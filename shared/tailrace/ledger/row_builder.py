"""Calls to the arrays of one row.

Invariants: all three arrays have one length; a position is trained only if an engine sampled it, its
log-probability is finite and its call is not masked; all others have log-probability 0 and no span.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailrace.ledger.returns import Conversation
from tailrace.ledger.tree import Call
from tailrace.provenance import join_spans, kept_spans
from tailrace_protos.base import (
    as_float32,
    as_int32,
    pack_float32,
    pack_int32,
    pack_uint8,
)
from tailrace_protos.generation import TokenSpan
from tailrace_protos.session import LedgerNode
from tailrace_protos.trajectory import TokenRow


class RowBuilder:
    """Grows by whole calls; `has_trained_tokens` tells whether the row is of use."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._trained: list[NDArray[np.bool_]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._turn_ends: list[int] = []
        self._turn_rewards: list[float] = []
        self._turn_returns: list[float] = []
        self._spans: list[TokenSpan] = []  # of all trained tokens
        self._num_tokens = 0
        self.has_trained_tokens = False

    def context(self, call: Call) -> None:
        """Append a call that another row trains, or none."""
        self._append(as_int32(call.node.inserted_ids))
        self._append(as_int32(call.node.token_ids))

    def turn(self, call: Call, reward: float, worth: float | None = None) -> None:
        """Append a call that this row trains; `reward` is its turn's, `worth` its return in the tree.

        A row has the returns of all of its turns or of none.
        """
        node = call.node
        self._append(as_int32(node.inserted_ids))
        logprobs = as_float32(node.inference_logprobs)
        trained = trained_tokens(node)
        self._append(as_int32(node.token_ids), trained, logprobs)
        self._spans += kept_spans(node.spans, trained)
        self._turn_ends.append(self._num_tokens)
        self._turn_rewards.append(reward)
        if worth is not None:
            self._turn_returns.append(worth)
        self.has_trained_tokens = self.has_trained_tokens or bool(trained.any())

    def row(self, row_id: str, reward: float, conversation: Conversation) -> TokenRow:
        """The row; `reward` is the return credited to it."""
        return TokenRow(
            token_ids=pack_int32(np.concatenate(self._ids)),
            loss_mask=pack_uint8(np.concatenate(self._trained).astype(np.uint8)),
            inference_logprobs=pack_float32(np.concatenate(self._logprobs)),
            spans=join_spans(self._spans),
            turn_ends=pack_int32(self._turn_ends),
            turn_rewards=pack_float32(self._turn_rewards),
            reward=reward,
            row_id=row_id,
            turn_returns=pack_float32(self._turn_returns),
            conversation=conversation.place,
            has_reward=conversation.has_reward,
        )

    def _append(
        self,
        ids: NDArray[np.int32],
        trained: NDArray[np.bool_] | None = None,
        logprobs: NDArray[np.float32] | None = None,
    ) -> None:
        num = len(ids)
        is_trained = np.zeros(num, np.bool_) if trained is None else trained
        self._ids.append(ids)
        self._trained.append(is_trained)
        zeros = np.zeros(num, np.float32)
        self._logprobs.append(zeros if logprobs is None else np.where(is_trained, logprobs, zeros))
        self._num_tokens += num


def trained_tokens(node: LedgerNode) -> NDArray[np.bool_]:
    """Which sampled tokens [t] of a call may be trained."""
    logprobs = as_float32(node.inference_logprobs)
    return np.zeros(len(logprobs), np.bool_) if node.is_masked else np.isfinite(logprobs)
