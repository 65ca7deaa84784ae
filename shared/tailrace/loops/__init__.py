"""Agent loops that come with Tailrace, by the name that a row's `agent_name` has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tailrace.config import ConfigError
from tailrace.import_path import load_object
from tailrace.loops.single_turn import SingleTurnLoop
from tailrace.loops.tool_agent import ToolAgentLoop
from tailrace.sdk.agent_loop import AgentLoop

__all__ = ["AGENT_LOOPS", "SingleTurnLoop", "ToolAgentLoop", "agent_loops"]

AGENT_LOOPS: dict[str, type[AgentLoop]] = {
    "single_turn_agent": SingleTurnLoop,
    "tool_agent": ToolAgentLoop,
}


def agent_loops(own: Mapping[str, str], key: str) -> dict[str, type[AgentLoop]]:
    """The built-in loops and the user's (name -> `module:Class`); `ConfigError` names `key`."""
    loops = dict(AGENT_LOOPS)
    for name, dotted in own.items():
        loop = load_object(dotted, f"{key}.{name}")
        if not isinstance(loop, type) or not callable(getattr(loop, "run", None)):
            raise ConfigError(
                f"{key}.{name}: {dotted!r} is no class with a method run(self, row, policy): derive it "
                "from tailrace.sdk.AgentLoop"
            )
        loops[name] = loop
    return loops


def unknown_loop(name: str, known: Mapping[str, object]) -> str:
    """What to say of a row whose agent is not known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"no agent loop is called {name!r}; {remedy} Own ones are named in agents.agent_loops"
