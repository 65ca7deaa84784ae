"""Agent loops that come with Tailrace, by the name that a row's `agent_name` has."""

import asyncio
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from tailrace.config import ConfigError
from tailrace.data import prompt_messages
from tailrace.import_path import load_object
from tailrace.sdk.agent_loop import (
    AgentLoop,
    ChatReply,
    EpisodeEnd,
    EpisodeOverError,
    EpisodePolicy,
)
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import OVER_BUDGET, Outcome


class SingleTurnLoop(AgentLoop):
    """Answers a row's prompt once; the reward service scores the answer."""

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> EpisodeEnd:
        """See `AgentLoop`."""
        await policy.complete(prompt_messages(row))
        return policy.finish()


class ToolAgentLoop(AgentLoop):
    """Plays a row with the tools that it names. Derive from it to change `is_done` or `observe`.

    Every call that the model makes is run, the calls of one reply at the same time. The model reads
    results and errors in the order of its calls. The answer to a malformed call is the reason.
    """

    async def run(self, row: dict[str, Any], policy: EpisodePolicy) -> EpisodeEnd:
        """See `AgentLoop`."""
        messages = list(prompt_messages(row))
        while True:
            try:
                reply = await policy.complete(messages, policy.tools.schemas)
            except EpisodeOverError as error:
                if len(messages) == len(prompt_messages(row)):
                    raise
                return policy.finish(
                    metrics={OVER_BUDGET: 1.0},
                    outcome=Outcome.POLICY_FAILURE,
                    reason=str(error),
                )
            messages.append(reply.message)
            if self.is_done(reply):
                return policy.finish()
            messages += await self.observe(reply, policy)

    def is_done(self, reply: ChatReply) -> bool:
        """True if this reply is the last one: it calls no tool and tries no malformed call."""
        return not reply.message.tool_calls and not reply.malformed

    async def observe(self, reply: ChatReply, policy: EpisodePolicy) -> list[ChatMessage]:
        """Returns the next messages: the results of the reply's calls."""
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


AGENT_LOOPS: dict[str, type[AgentLoop]] = {
    "single_turn_agent": SingleTurnLoop,
    "tool_agent": ToolAgentLoop,
}


def agent_loops(own: Mapping[str, str], key: str) -> dict[str, type[AgentLoop]]:
    """Returns the built-in loops and the user's (name -> `module:Class`); `ConfigError` names `key`."""
    loops = dict(AGENT_LOOPS)
    for name, dotted in own.items():
        loop = load_object(dotted, f"{key}.{name}")
        if not isinstance(loop, type) or not callable(getattr(loop, "run", None)):
            raise ConfigError(
                f"{key}.{name}: {dotted!r} is no class with a method run(self, row, policy): derive it "
                "from tailrace.sdk.AgentLoop"
            )
        _check_signature(loop, f"{key}.{name}: {dotted!r}")
        loops[name] = loop
    return loops


def _check_signature(loop: type[AgentLoop], place: str) -> None:
    """Raises `ConfigError` for a loop that cannot be made and run."""
    if not inspect.iscoroutinefunction(inspect.unwrap(loop.run)):  # decorators may wrap it
        raise ConfigError(f"{place}: its run is not async: write `async def run(self, row, policy)`")
    for call, args in ((loop, ()), (loop.run, ("self", "row", "policy"))):
        try:
            inspect.signature(call).bind(*args)
        except TypeError as error:
            raise ConfigError(
                f"{place}: it cannot be made without arguments and run with (row, policy): {error}: "
                "write `async def run(self, row, policy)`"
            ) from error


def unknown_loop(name: str, known: Mapping[str, object]) -> str:
    """Message for a row whose agent is not known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"no agent loop is called {name!r}; {remedy} Own ones are named in agents.agent_loops"
