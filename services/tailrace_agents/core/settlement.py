"""Settlement of a played episode: an item to score, then a `Trajectory`.

Invariant: only valid outcomes carry a reward. An episode without a score has none, so it is no longer
valid.
"""

import msgspec

from tailrace_agents.core.episode import EpisodeResult
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.reward import Score, ScoreItem
from tailrace_protos.trajectory import TokenRow, Trajectory


def score_item(task: EpisodeTask, result: EpisodeResult) -> ScoreItem:
    """Makes the item that the reward service scores."""
    return ScoreItem(
        episode_id=task.episode_id,
        task=msgspec.structs.replace(task.task, row=result.row) if result.row else task.task,
        messages=tuple(result.messages),
        turn_rewards=result.transcript.turn_rewards,
        metrics=result.metrics,
    )


def apply_score(result: EpisodeResult, score: Score) -> float:
    """Returns the episode's reward; a failed score makes the episode an infrastructure failure."""
    if score.error is not None:
        result.outcome = Outcome.INFRA_FAILURE
        result.reason = f"reward: {score.error.reason}"
        return 0.0
    result.metrics.update({f"reward/{name}": value for name, value in score.components.items()})
    return score.reward


def build_trajectory(
    task: EpisodeTask,
    result: EpisodeResult,
    rows: tuple[TokenRow, ...],
    reward: float,
    started_unix_s: float,
    finished_unix_s: float,
) -> Trajectory:
    """Builds the trajectory that the learner reads."""
    return Trajectory(
        episode_id=task.episode_id,
        group_id=task.group_id,
        member=task.member,
        attempt=task.attempt,
        phase=task.phase,
        task=task.task,
        outcome=result.outcome,
        reason=result.reason,
        reward=reward,
        metrics=result.metrics,
        started_unix_s=started_unix_s,
        finished_unix_s=finished_unix_s,
        rows=rows,
        stages=msgspec.structs.replace(result.stages, room_s=task.room_wait_s),
    )
