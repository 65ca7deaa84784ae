"""Root spans of sampled episodes, from admission to settlement."""

from collections.abc import Sequence

from tailrace import tracing
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.event import EpisodeSettled, EventBody


class RootSpans:
    """Times of admitted episodes; a new scheduler knows none, and uses the start of the play."""

    def __init__(self) -> None:
        self._admitted_unix_s: dict[str, float] = {}

    def admitted(self, tasks: Sequence[EpisodeTask], now_unix_s: float) -> None:
        """Notes the time at which episodes go to the queue for the first time."""
        for task in tasks:
            if tracing.episode(task.episode_id):
                self._admitted_unix_s.setdefault(task.episode_id, now_unix_s)

    def take(self, body: EventBody) -> None:
        """Records a settled episode, and its time in the queue unless the scheduler ended it: then
        nobody says when its play began."""
        if not isinstance(body, EpisodeSettled):
            return
        root = tracing.episode(body.episode_id)
        if not root:
            return
        begun = self._admitted_unix_s.pop(body.episode_id, body.started_unix_s)
        if body.started_unix_s < body.finished_unix_s:
            tracing.record("queue", root, begun, body.started_unix_s)
        tracing.record(
            "episode",
            "",
            begun,
            body.finished_unix_s,
            traceparent=root,
            episode_id=body.episode_id,
            group_id=body.group_id,
            phase=body.phase,
            outcome=body.outcome.value,
            reason=body.reason,
            reward=body.reward,
            num_turns=body.num_turns,
            num_sampled_tokens=body.num_sampled_tokens,
        )
