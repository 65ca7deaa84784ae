"""The frameworks that `test_frameworks.py` plays, and the replies of the scripted model to each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tailrace_protos.generation import GenerateRequest
from tests.world.byte_model import call_text

Script = Callable[[str, GenerateRequest], str]


def calls_double(prompt: str, request: GenerateRequest) -> str:
    """Two calls of the tool, then the answer."""
    match prompt.count("<tool_response>"):
        case 0:
            return call_text("double", number=21)
        case 1:
            return call_text("double", number=42)
        case _:
            return "84"


def calls_final_answer(prompt: str, request: GenerateRequest) -> str:
    """The same for smolagents: results are observations by text, and the answer is a tool call too."""
    match prompt.count("Observation:\n"):
        case 0:
            return call_text("double", number=21)
        case 1:
            return call_text("double", number=42)
        case _:
            return call_text("final_answer", answer="84")


def answers_by_tool(prompt: str, request: GenerateRequest) -> str:
    """A typed answer out of bounds, and the right one after the complaint about it."""
    return call_text("Answer", number=84 if "greater than or equal to 80" in prompt else 21)


def fills_fields(prompt: str, request: GenerateRequest) -> str:
    """DSPy's fields by text: two calls of the tool, the end of calls, the answer."""
    if "next_tool_name" not in prompt.rpartition("Respond with")[2]:
        return _fields(reasoning="Twice twice.", answer="84")
    for number, observed in ((21, "observation_0"), (42, "observation_1")):
        if f"[[ ## {observed}" not in prompt and observed not in prompt:
            arguments = json.dumps({"number": number})
            return _fields(next_thought="Twice.", next_tool_name="double", next_tool_args=arguments)
    return _fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}")


def _fields(**values: str) -> str:
    written = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items())
    return f"{written}[[ ## completed ## ]]"


def thinking(script: Script) -> Script:
    """The same replies with a thought before each, and a word before those that go on with the task."""

    def reply(prompt: str, request: GenerateRequest) -> str:
        said = script(prompt, request)
        word = "So: " if '"double"' in said else ""
        return f"<think>I compute.</think>{word}{said}"

    return reply


@dataclass(frozen=True)
class Framework:
    """One framework: its player, the environment of its packages, and the shape of its episode."""

    name: str
    package: str  # with the version in its environment's list
    player: str  # module in agents/
    environment: str
    script: Script = calls_double
    num_calls: int = 3
    streams: bool = True  # it can stream
    drops_text: bool = False  # it leaves out the text beside a tool call when it sends it back
    rewrites: str = ""  # how it sends its history in another form, which makes each call a row
    num_new_forks: int = 0  # forks where it rewrites
    reward: float = 1.0  # that its player returns for the right answer, and so that of every row

    def num_rows(self, rich: bool) -> int:
        """Rows of an episode; `rich`: of replies with text beside tool calls."""
        if self.rewrites:
            return self.num_calls
        return self.num_calls if rich and self.drops_text else 1

    def num_forks(self, rich: bool) -> int:
        """Continuations of the history in another form than it was sampled in."""
        return self.num_new_forks if self.rewrites else self.num_rows(rich) - 1


OPENAI2, OPENAI3, MCP1, NODE = ".venv-openai2", ".venv-openai3", ".venv-mcp1", ".venv"
FRAMEWORKS = (
    Framework("OpenAI SDK", "openai", "openai_player", OPENAI3),
    Framework("OpenAI Agents SDK", "openai-agents", "openai_agents_player", OPENAI3),
    Framework("Anthropic SDK", "anthropic", "anthropic_player", OPENAI3),
    Framework("LangChain", "langchain", "langchain_player", OPENAI3),
    Framework("LangGraph", "langgraph", "langgraph_player", OPENAI3),
    Framework("CAMEL", "camel-ai", "camel_player", MCP1, drops_text=True),
    Framework("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_player", OPENAI3),
    Framework("pydantic-ai, Anthropic", "pydantic-ai-slim", "pydantic_ai_anthropic_player", OPENAI3),
    Framework("litellm", "litellm", "litellm_player", OPENAI2),
    Framework("Google ADK", "google-adk", "google_adk_player", OPENAI2),
    Framework("LlamaIndex", "llama-index-core", "llama_index_player", OPENAI2),
    Framework("AutoGen", "autogen-agentchat", "autogen_player", OPENAI2),
    Framework("Strands", "strands-agents", "strands_player", OPENAI2),
    Framework(
        "instructor",
        "instructor",
        "instructor_player",
        OPENAI2,
        answers_by_tool,
        num_calls=2,
        streams=False,  # its partial answers are not checked, so it never asks again
    ),
    Framework(
        "DSPy ReAct",
        "dspy",
        "dspy_player",
        OPENAI2,
        fills_fields,
        num_calls=4,
        rewrites="each call is a new prompt",
    ),
    Framework(
        "smolagents",
        "smolagents",
        "smolagents_player",
        OPENAI2,
        calls_final_answer,
        rewrites="tool calls become text",
        num_new_forks=2,
    ),
    Framework("CrewAI", "crewai", "crewai_player", MCP1, drops_text=True),
    Framework("AG2", "ag2", "ag2_player", OPENAI3),
    Framework("Haystack", "haystack-ai", "haystack_player", OPENAI2),
    Framework("Semantic Kernel", "semantic-kernel", "semantic_kernel_player", OPENAI2, drops_text=True),
    Framework("Vercel AI SDK", "ai", "vercel_ai_player", NODE),
    Framework("Vercel AI SDK, responses", "@ai-sdk/openai", "vercel_ai_openai_player", NODE),
)


def page_table(folder: Path) -> str:
    """The table of docs/frameworks.md; `folder` has the lists of packages."""
    listed = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
    versions = dict(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)$", listed, re.MULTILINE))
    versions |= json.loads((folder / "vercel_ai" / "package.json").read_text())["dependencies"]
    lines = [
        "| framework | version | calls | rows | reward of each row | forks | streamed | history |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in FRAMEWORKS:
        history = one.rewrites or (
            "leaves out text beside tool calls" if one.drops_text else "as it was"
        )
        rows = dict.fromkeys(one.num_rows(rich) for rich in (False, True))
        forks = dict.fromkeys(one.num_forks(rich) for rich in (False, True))
        cells = (
            one.name,
            versions[one.package],
            str(one.num_calls),
            ", ".join(map(str, rows)),
            str(one.reward),
            ", ".join(map(str, forks)),
            "yes" if one.streams else "no",
            history,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
