"""Score requests: decode, score, reply."""

import time

from tailrace import tracing
from tailrace_protos.reward import ScoreReply, ScoreRequest
from tailrace_reward import metrics
from tailrace_reward.core.scoring import Scorer


class ScoreHandler:
    """Answers `ScoreRequest`s."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._ok = metrics.SCORES.labels("ok")
        self._failed = metrics.SCORES.labels("failed")

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Scores of all items; an item that cannot be scored has an error in its place."""
        began_unix_s = time.time()
        with metrics.SCORING.track_inprogress():
            scores = await self._scorer.score(request.items)
        for score in scores:
            if root := tracing.episode(score.episode_id):
                tracing.record(
                    "score",
                    root,
                    began_unix_s,
                    time.time(),
                    reward=score.reward,
                    num_episodes=len(scores),
                )
        num_failed = sum(score.error is not None for score in scores)
        self._ok.inc(len(scores) - num_failed)
        self._failed.inc(num_failed)
        return ScoreReply(scores)
