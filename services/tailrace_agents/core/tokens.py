"""The tokens of one episode, appended turn by turn: what the engine sees and the learner trains.

Invariant: the four arrays have one length; what the renderer inserted has mask 0, log-probability 0
and policy version -1.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.base import EMPTY, Float32Bytes, Int32Bytes, UInt8Bytes, pack_float32, pack_int32
from tailrace_protos.generation import VersionSpan

assert array("i").itemsize == 4, "array('i') is the wire's int32"


class TokenArrays(NamedTuple):
    """Raw arrays of a `Trajectory`, and how many sampled tokens had no finite log-probability."""

    token_ids: Int32Bytes
    loss_mask: UInt8Bytes
    inference_logprobs: Float32Bytes
    policy_versions: Int32Bytes
    turn_ends: Int32Bytes
    turn_rewards: Float32Bytes
    num_nonfinite: int


class EpisodeTokens:
    """Growing buffers; appending costs the new tokens only, whatever came before."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_mask",
        "_turn_ends",
        "_turn_rewards",
        "_versions",
        "num_sampled",
    )

    def __init__(self) -> None:
        self._ids = array("i")
        self._mask = bytearray()
        self._logprobs = array("f")
        self._versions = array("i")
        self._turn_ends = array("i")
        self._turn_rewards = array("d")
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
        self._versions.frombytes(b"\xff" * (4 * num))  # -1

    def sample(
        self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], spans: tuple[VersionSpan, ...]
    ) -> None:
        """Append a turn's ids [t] that an engine emitted."""
        num = len(ids)
        assert num == len(logprobs) == sum(span.num_tokens for span in spans), (
            "a token without provenance"
        )
        self._ids.frombytes(ids.tobytes())
        self._mask.extend(b"\x01" * num)
        self._logprobs.frombytes(logprobs.tobytes())
        for span in spans:
            self._versions.extend((span.policy_version,) * span.num_tokens)
        self.num_sampled += num
        self._turn_ends.append(len(self._ids))

    def finish_turn(self, reward: float) -> None:
        """The environment answered the turn sampled last."""
        self._turn_rewards.append(reward)

    def prompt(self) -> Int32Bytes:
        """All ids so far, copied: buffers go on growing while the request is under way."""
        return memoryview(self._ids.tobytes())

    def arrays(self) -> TokenArrays:
        """The wire arrays; tokens with a non-finite log-probability lose mask, value and version."""
        logprobs = np.array(self._logprobs, dtype=np.float32)
        mask = np.frombuffer(bytes(self._mask), dtype=np.uint8)
        versions = np.array(self._versions, dtype=np.int32)
        broken = ~np.isfinite(logprobs)
        num_broken = int(np.count_nonzero(broken))
        if num_broken:
            mask = np.where(broken, np.uint8(0), mask)
            logprobs[broken], versions[broken] = 0.0, -1
        ends = self._turn_ends[: self.num_turns]
        return TokenArrays(
            self.prompt(),
            _bytes(mask),
            _bytes(logprobs),
            _bytes(versions),
            pack_int32(ends),
            pack_float32(self._turn_rewards),
            num_broken,
        )


def _bytes(values: NDArray[np.generic]) -> memoryview:
    return values.data.cast("B") if len(values) else EMPTY
