"""`single_turn_agent`: one prompt, one answer."""

from __future__ import annotations

from typing import Any

from tailrace.data import prompt_messages
from tailrace.sdk.agent_loop import AgentLoop, EpisodePolicy
from tailrace_protos.trajectory import Trajectory


class SingleTurnLoop(AgentLoop):
    """Answers a row's prompt once; the reward service says what the answer is worth."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> Trajectory:
        """See `AgentLoop`."""
        reply = await policy.complete(prompt_messages(row))
        was_cut = float(reply.finish_reason == "length")
        return policy.finish(metrics={"num_cut_replies": was_cut})
