"""Finished episodes as the learner reads them."""

import msgspec

from tailrace_protos.base import (
    EMPTY,
    Count,
    Finite,
    Float32Bytes,
    Int32Bytes,
    Int64Bytes,
    Message,
    UInt8Bytes,
)
from tailrace_protos.episode import EnvTask, Outcome, StageSeconds
from tailrace_protos.generation import TokenSpan
from tailrace_protos.subjects import Phase

# Beyond it squared gradients, as norms and optimizers take them, come near the end of float32.
MAX_REWARD = 1e12


class TokenRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row to train: tokens exactly as the engine saw and emitted them.

    The three token arrays have the same length T. Positions with `loss_mask` 0 were inserted by the
    renderer, are trained in another row, or had no finite log-probability; their log-probability is 0.
    `spans` cover the S positions with `loss_mask` 1, in the order of the row, and no others.
    """

    token_ids: Int32Bytes = EMPTY  # [T]
    loss_mask: UInt8Bytes = EMPTY  # [T] 1 where the policy sampled
    inference_logprobs: Float32Bytes = EMPTY  # [T]
    spans: tuple[TokenSpan, ...] = ()  # their `num_tokens` sum to S
    turn_ends: Int32Bytes = EMPTY  # [K] end (exclusive) of each turn that this row trains
    turn_rewards: Float32Bytes = EMPTY  # [K]
    reward: float = 0.0  # the return credited to this row
    row_id: str = ""  # unique in its episode; empty when the episode has one row
    turn_hashes: Int64Bytes = EMPTY  # [K] of task and observation before each turn; or empty
    first_turn: int = -1  # where rows are stretches of one line of turns: place of the first in it
    # [K] what each turn is worth with what followed it in its message tree; empty: turns follow each
    # other. What `reward` has beyond that of the first turn with a trained token, every turn has.
    turn_returns: Float32Bytes = EMPTY
    conversation: int = 0  # place of the row's conversation among those of the episode
    has_reward: bool = True  # whether any call of that conversation was given one


class Trajectory(Message, frozen=True, tag="trajectory"):
    """One settled episode and its rows: one for an environment, several where a conversation forked
    or where every model call is a row of its own. No token is trained by two rows.
    """

    episode_id: str
    group_id: str
    member: Count
    attempt: Count
    phase: Phase
    task: EnvTask
    outcome: Outcome
    reason: str  # why, when the outcome is not ok
    reward: float  # return of the episode: what group statistics are made of; the learner counts NaN
    metrics: dict[str, Finite]
    started_unix_s: float
    finished_unix_s: float
    rows: tuple[TokenRow, ...] = ()
    is_greedy: bool = False  # played at temperature 0, as a baseline: never trained
    stages: StageSeconds = StageSeconds()

    @property
    def success(self) -> float | None:
        """Degree of success: what the task reported, otherwise 1 for a reward above 0.

        None if the outcome is not valid. Training and evaluation use no other definition.
        """
        if not self.outcome.is_valid:
            return None
        return self.metrics.get("success", float(self.reward > 0))

    @property
    def reports_success(self) -> bool:
        """True if `success` is what the task reported."""
        return "success" in self.metrics


class TrajectoryGroup(Message, frozen=True, tag="trajectory_group"):
    """A closed group: its settled members, cancelled ones included (without rows)."""

    group_id: str
    group_index: Count
    members: tuple[Trajectory, ...]
