"""The tokens of an episode whose turns are rows: each turn's prompt is a window of those before it.

The policy sees the newest observation and, before it, so many earlier turns. A window begins with its
first observation rendered anew, as where nothing stands before it, behind what the environment wants
to stay in sight (its rules, its question); all after that are the tokens of the episode as they are.
Invariant: a row's context is what the policy saw when it sampled the row's turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tailrace.provenance import cut_spans
from tailrace_agents.core.tokens import CheckedRows, EpisodeTokens
from tailrace_protos.base import (
    Int32Bytes,
    as_float32,
    as_int32,
    as_int64,
    as_uint8,
    pack_float32,
    pack_int32,
    pack_int64,
    pack_uint8,
)
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow


class StepTokens(EpisodeTokens):
    """`EpisodeTokens` that are one row per turn; `history_turns` None: all earlier turns are seen."""

    __slots__ = ("_history_turns", "_openings", "_reply_starts")

    shows_windows = True

    def __init__(self, history_turns: int | None = None) -> None:
        super().__init__()
        self._history_turns = history_turns
        self._openings: list[NDArray[np.int32]] = []
        self._reply_starts: list[int] = []

    def open_with(self, ids: NDArray[np.int32]) -> None:
        """See `EpisodeTokens`; kept for windows that begin here."""
        self._openings.append(ids)

    def sample(
        self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], spans: tuple[TokenSpan, ...]
    ) -> None:
        """See `EpisodeTokens`."""
        self._reply_starts.append(len(self))
        super().sample(ids, logprobs, spans)

    @property
    def num_shown(self) -> int:
        """See `EpisodeTokens`."""
        turn = len(self._reply_starts)
        first = self._first_of(turn)
        after = len(self) - self._reply_starts[first] if first < turn else 0
        return len(self._openings[first]) + after

    def prompt(self) -> Int32Bytes:
        """The window of the next turn."""
        turn = len(self._reply_starts)
        return pack_int32(self._window(turn, as_int32(self.transcript()), len(self)))

    def rows(self, reward: float) -> CheckedRows:
        """A row for every turn that the environment has answered, all credited with `reward`."""
        if not len(self):
            return CheckedRows((), 0)
        whole, num_nonfinite = self.row(reward)
        rows = tuple(self._row(whole, turn) for turn in range(self.num_turns))
        return CheckedRows(rows, num_nonfinite)

    def _first_of(self, turn: int) -> int:
        """The first turn that the policy sees in `turn`."""
        return 0 if self._history_turns is None else max(0, turn - self._history_turns)

    def _window(self, turn: int, ids: NDArray[np.int32], stop: int) -> NDArray[np.int32]:
        """What the policy sees of `ids` [T], up to `stop`, from the window of `turn` on."""
        first = self._first_of(turn)
        begin = self._reply_starts[first] if first < len(self._reply_starts) else stop
        return np.concatenate([self._openings[first], ids[begin:stop]])

    def _row(self, whole: TokenRow, turn: int) -> TokenRow:
        start, stop = self._reply_starts[turn], int(as_int32(whole.turn_ends)[turn])
        ids = self._window(turn, as_int32(whole.token_ids), stop)
        num_shown = len(ids) - (stop - start)
        mask = as_uint8(whole.loss_mask)
        trained = int(mask[:start].sum()), int(mask[:stop].sum())

        def placed(values: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([np.zeros(num_shown, values.dtype), values[start:stop]])

        return replace(
            whole,
            token_ids=pack_int32(ids),
            loss_mask=pack_uint8(placed(mask)),
            inference_logprobs=pack_float32(placed(as_float32(whole.inference_logprobs))),
            spans=cut_spans(whole.spans, *trained),
            turn_ends=pack_int32([len(ids)]),
            turn_rewards=pack_float32(as_float32(whole.turn_rewards)[turn : turn + 1]),
            turn_hashes=pack_int64(as_int64(whole.turn_hashes)[turn : turn + 1]),
            row_id=str(turn),
            first_turn=turn,
        )
