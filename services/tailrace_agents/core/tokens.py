"""The tokens of one episode, appended turn by turn: what the engine sees and the learner trains.

Invariant: the three arrays have one length; what the renderer inserted has mask and log-probability 0.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.provenance import kept_spans
from tailrace_protos.base import EMPTY, Int32Bytes, pack_float32, pack_int32, pack_int64
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow

assert array("i").itemsize == 4, "array('i') is the wire's int32"


class CheckedRow(NamedTuple):
    """An episode's row, and how many sampled tokens of it had no finite log-probability."""

    row: TokenRow
    num_nonfinite: int


class CheckedRows(NamedTuple):
    """As `CheckedRow`, for all rows of an episode."""

    rows: tuple[TokenRow, ...]
    num_nonfinite: int


class EpisodeBooks(Protocol):
    """What an episode inserted and sampled, whoever kept the books."""

    @property
    def num_turns(self) -> int:
        """Finished turns (of loops: model calls)."""

    @property
    def num_sampled(self) -> int:
        """Tokens sampled over all turns."""

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """What each turn was worth."""

    def __len__(self) -> int:
        """Tokens, inserted and sampled."""
        ...

    def rows(self, reward: float) -> CheckedRows:
        """What is trained, once the episode's return is known."""


class EpisodeTokens:
    """Growing buffers; appending costs the new tokens only, whatever came before."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_mask",
        "_spans",
        "_turn_ends",
        "_turn_hashes",
        "_turn_rewards",
        "num_sampled",
    )

    shows_windows = False  # whether a prompt may begin with a later observation than the first

    def __init__(self) -> None:
        self._ids = array("i")
        self._mask = bytearray()
        self._logprobs = array("f")
        self._spans: list[TokenSpan] = []  # of all sampled tokens
        self._turn_ends = array("i")
        self._turn_rewards = array("d")
        self._turn_hashes = array("q")
        self.num_sampled = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_turns(self) -> int:
        """Turns that the environment has answered."""
        return len(self._turn_rewards)

    @property
    def last_id(self) -> int:
        """The newest token's id."""
        return self._ids[-1]

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The environment's reward of each finished turn."""
        return tuple(self._turn_rewards)

    def insert(self, ids: NDArray[np.int32]) -> None:
        """Append ids [o] that the renderer made."""
        num = len(ids)
        self._ids.frombytes(ids.tobytes())
        self._mask.extend(bytes(num))
        self._logprobs.frombytes(bytes(4 * num))

    def sample(
        self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], spans: tuple[TokenSpan, ...]
    ) -> None:
        """Append a turn's ids [t] that an engine emitted."""
        num = len(ids)
        assert num == len(logprobs) == sum(span.num_tokens for span in spans), (
            "a token without provenance"
        )
        self._ids.frombytes(ids.tobytes())
        self._mask.extend(b"\x01" * num)
        self._logprobs.frombytes(logprobs.tobytes())
        self._spans += spans
        self.num_sampled += num
        self._turn_ends.append(len(self._ids))

    def finish_turn(self, reward: float, observed: int) -> None:
        """The environment answered the turn sampled last, which had begun with `observed`."""
        self._turn_rewards.append(reward)
        self._turn_hashes.append(observed)

    @property
    def num_shown(self) -> int:
        """Tokens of the next turn's prompt."""
        return len(self)

    def open_with(self, ids: NDArray[np.int32]) -> None:
        """The observation inserted last as it is rendered where a prompt begins with it."""

    def prompt(self) -> Int32Bytes:
        """What the next turn is asked with: all ids so far."""
        return self.transcript()

    def transcript(self) -> Int32Bytes:
        """All ids so far, copied: buffers go on growing while the request is under way."""
        return memoryview(self._ids.tobytes())

    def row(self, reward: float = 0.0) -> CheckedRow:
        """The row to train; tokens with a non-finite log-probability lose mask and value."""
        logprobs = np.array(self._logprobs, dtype=np.float32)
        mask = np.frombuffer(bytes(self._mask), dtype=np.uint8)
        broken = ~np.isfinite(logprobs)
        num_broken = int(np.count_nonzero(broken))
        if num_broken:
            mask = np.where(broken, np.uint8(0), mask)
            logprobs[broken] = 0.0
        ends = self._turn_ends[: self.num_turns]
        is_sampled = np.frombuffer(bytes(self._mask), dtype=np.bool_)
        row = TokenRow(
            token_ids=self.transcript(),
            loss_mask=_bytes(mask),
            inference_logprobs=_bytes(logprobs),
            spans=kept_spans(self._spans, ~broken[is_sampled]),
            turn_ends=pack_int32(ends),
            turn_rewards=pack_float32(self._turn_rewards),
            turn_hashes=pack_int64(self._turn_hashes),
            reward=reward,
        )
        return CheckedRow(row, num_broken)

    def rows(self, reward: float) -> CheckedRows:
        """The one row, or none of an episode that never began."""
        if not len(self):
            return CheckedRows((), 0)
        row, num_nonfinite = self.row(reward)
        return CheckedRows((row,), num_nonfinite)


def _bytes(values: NDArray[np.generic]) -> memoryview:
    return values.data.cast("B") if len(values) else EMPTY


def observation_hash(task: str, observation: str) -> int:
    """Names what the policy saw, salted with its task: two tasks never share an observation."""
    salt = hashlib.blake2b(task.encode(), digest_size=16).digest()
    digest = hashlib.blake2b(observation.encode(), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little", signed=True)
