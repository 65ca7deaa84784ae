"""A small world for agent loops: a chat model of single characters, tools that do as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tailrace.channel.generation import Generation
from tailrace.chat import ChatArgs, Renderer
from tailrace.clock import SystemClock
from tailrace.policy import Stages
from tailrace.sdk import tool
from tailrace.sdk.agent_loop import AgentLoop, LoopLimits
from tailrace.sdk.policy import TurnRequest
from tailrace.tools import LocalTools
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.loop_player import play_row
from tailrace_agents.core.machine import Episode, PhaseArgs, PlayContext
from tailrace_agents.core.model import LoopPlan
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import NoJournal
from tailrace_protos.base import as_int32, encode
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.journal import JournalRecord, decode_record
from tailrace_protos.session import ExportStyle
from tailrace_protos.weights import ModelCard

SPECIAL = ("<unk>", "<|start|>", "<|end|>")
TEMPLATE = (
    "{%- if tools -%}<|start|>tools"
    "{%- for tool in tools -%}{{- ' ' + tool.function.name -}}{%- endfor -%}"
    "<|end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '\n' + (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}"
    "{{- '<tool_call>\n' + (said | tojson) + '\n</tool_call>' -}}{%- endfor -%}"
    "<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\n' -}}{%- endif -%}"
)
LIMITS = LoopLimits(
    max_episode_tokens=8192,
    max_new_tokens=2048,
    max_tokens_per_step=0,
    max_turns=8,
    wall_clock_s=0.0,
    max_tool_s=30.0,
    tool_timeout_s=60,
    max_tool_output_chars=0,
)


@cache
def chat_card() -> ModelCard:
    """The card of a model whose tokens are characters."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return ModelCard(
        b"{}",
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        },
    )


@cache
def chat_renderer() -> Renderer:
    return Renderer.from_model_card(chat_card(), ChatArgs(tool_parser="hermes"))


def calls(*named: tuple[str, dict[str, Any]], text: str = "") -> str:
    """A reply that calls tools."""
    blocks = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in named)
    return text + "".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


Reply = str | Exception | Callable[[], Any]


class ChatPolicy:
    """Says the given replies in turn, or what `by_prompt` makes of the prompt's text."""

    def __init__(self, *replies: Reply, by_prompt: Callable[[str], str] | None = None) -> None:
        self.replies = list(replies)
        self.by_prompt = by_prompt
        self.prompts: list[str] = []
        self.prompt_ids: list[list[int]] = []
        self.budgets: list[int] = []
        self.samplings: list[SamplingParams] = []

    async def generate(self, request: TurnRequest) -> Generation:
        ids = as_int32(request.prompt_ids)
        self.prompt_ids.append(ids.tolist())
        text = text_of(ids)
        self.prompts.append(text)
        self.budgets.append(request.max_new_tokens)
        self.samplings.append(request.sampling)
        await asyncio.sleep(0)
        reply = self.by_prompt(text) if self.by_prompt else self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            reply = await reply()
        said = chat_renderer().reply_ids(str(reply))
        reason = FinishReason.STOP if len(said) <= request.max_new_tokens else FinishReason.LENGTH
        said = said[: request.max_new_tokens]
        logprobs = np.full(len(said), -0.5, np.float32)
        return Generation(said, logprobs, (TokenSpan(1, "", len(said)),), reason, None, 0)


def text_of(ids: Any) -> str:
    """Ids as text, special tokens included."""
    tokenizer = Tokenizer.from_str(chat_card().tokenizer_files["tokenizer.json"].decode())
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


class RecordList:
    """A journal in a list; records go through the wire as real ones do."""

    may_have_records = True

    def __init__(self, records: Sequence[bytes] = (), fails_at: int = -1, error: Any = None) -> None:
        self.records = list(records)
        self.fails_at = fails_at
        self.error = error

    async def load(self) -> list[JournalRecord]:
        return [decode_record(record) for record in self.records]

    async def append(self, record: JournalRecord) -> None:
        if record.index == self.fails_at:
            raise self.error
        self.records.append(encode(record))

    async def require_own(self) -> None:
        """Nobody else loads it."""

    async def clear(self) -> None:
        self.records.clear()


def context(max_new_tokens: int = 2048, **changes: Any) -> PlayContext:
    args = PhaseArgs(SamplingParams(stop_token_ids=chat_renderer().stop_token_ids), max_new_tokens)
    made: dict[str, Any] = {
        "phases": {"train": args, "eval": args},
        "max_episode_tokens": 8192,
        "clock": SystemClock(),
        "stages": Stages(),
        "is_draining": lambda: False,
    }
    return PlayContext(**{**made, **changes})


def task(deadline_s: float = 20.0) -> EpisodeTask:
    deadline = SystemClock().unix_s() + deadline_s
    return EpisodeTask("g0.0", "g0", 0, 0, "train", EnvTask("rows", 0, 0), deadline)


async def play(
    loop: type[AgentLoop],
    policy: Any,
    tools: Sequence[Any] = (),
    *,
    row: dict[str, Any] | None = None,
    limits: LoopLimits = LIMITS,
    max_new_tokens: int = 2048,
    journal: Any = None,
    deadline_s: float = 20.0,
    style: ExportStyle = ExportStyle.CONCAT,
    observer: Any = None,
    **changes: Any,
) -> EpisodeResult:
    """Play one row of `loop` with `tools` in this process."""
    local = LocalTools(tools)
    names = [one.spec.name if hasattr(one, "spec") else one.name for one in tools]
    row = {"prompt": "Go.", "tools": names, "tools_kwargs": {}, **(row or {})}
    episode = Episode(task(deadline_s), context(max_new_tokens, **changes), limits, row)
    model, plan = TokenModel(chat_renderer(), policy), LoopPlan(limits, style, 1.0)
    session = local.session("g0.0", row["tools"], create_kwargs=row["tools_kwargs"])
    try:
        return await play_row(loop, episode, model, plan, session, journal or NoJournal(), observer)
    finally:
        await local.close()


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return f"echo {text}"


@tool
async def broken(text: str) -> str:
    """Fail."""
    raise RuntimeError(f"cannot {text}")
