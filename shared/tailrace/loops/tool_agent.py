"""`tool_agent`: the model calls tools until it answers without a call.

Invariants: every call that the model makes is run, those of one reply at the same time; what a tool
says, also that it failed, is read by the model in the order of its calls; a call that cannot be read
is answered by what is wrong with it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tailrace.data import prompt_messages
from tailrace.sdk.agent_loop import AgentLoop, ChatReply, EpisodeOverError, EpisodePolicy
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import OVER_BUDGET, Outcome
from tailrace_protos.trajectory import Trajectory


class ToolAgentLoop(AgentLoop):
    """Plays a row with the tools that it names. Derive from it to change `is_done` or `observe`."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> Trajectory:
        """See `AgentLoop`."""
        messages = list(prompt_messages(row))
        num_cut = 0
        while True:
            try:
                reply = await policy.complete(messages, policy.tools.schemas)
            except EpisodeOverError as error:
                if len(messages) == len(prompt_messages(row)):
                    raise
                return policy.finish(
                    metrics={"num_cut_replies": num_cut, OVER_BUDGET: 1.0},
                    outcome=Outcome.POLICY_FAILURE,
                    reason=str(error),
                )
            num_cut += reply.finish_reason == "length"
            messages.append(reply.message)
            if self.is_done(reply):
                return policy.finish(metrics={"num_cut_replies": num_cut})
            messages += await self.observe(reply, policy)

    def is_done(self, reply: ChatReply) -> bool:
        """Whether this reply is the last one: it calls no tool, not even in vain."""
        return not reply.message.tool_calls and not reply.malformed

    async def observe(self, reply: ChatReply, policy: EpisodePolicy) -> list[ChatMessage]:
        """What the model reads next: the results of its calls."""
        calls = reply.message.tool_calls
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(policy.tools.call(call)) for call in calls]
        observed = [
            ChatMessage("tool", task.result().content, tool_call_id=call.id, name=call.name)
            for call, task in zip(calls, running, strict=True)
        ]
        if reply.malformed:
            note = f"A tool call could not be read and was not run: {reply.malformed}"
            observed.append(ChatMessage("user", note))
        return observed
