"""Random conversations with tools between a client that sends text and an engine that samples tokens.

Whatever the engine samples carries a mark; the renderer's tokenizer fails when asked to encode one.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.generation import Generation
from tailrace.chat import ParsedReply, Renderer
from tailrace.chat.model_files import read_chat_model
from tailrace.config.run import ChatArgs
from tailrace.ledger import Ledger, Prompt
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.generation import FinishReason, TokenSpan
from tests.unit.tailrace.chat.families import TOOLS, Family, card, encoded, tokenizer

MARK = re.compile(r"Zq\d+Z")
_WORDS = (
    "boats",
    "go left",
    "fine\n\nweather ",
    " {x}",
    "ünïcödé ✓",
    '"quoted"',
    "\nuser\n",
    "<b>",
    "",
)


class GuardedTokenizer:
    """Tokenizer that fails if it encodes sampled text."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_encoded = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        for text in texts:
            found = MARK.search(text)
            assert found is None, f"sampled text {found and found.group()} is encoded again"
        self.num_encoded += len(texts)
        return self._inner.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("encode"), f"{name} does not look at what it is given"
        return getattr(self._inner, name)


def guarded_renderer(family: Family) -> tuple[Renderer, GuardedTokenizer]:
    """Renderer of the family with such a tokenizer."""
    model = read_chat_model(card(family), {})
    guard = GuardedTokenizer(model.tokenizer)
    return Renderer(model._replace(tokenizer=guard), ChatArgs()), guard


class Engine:
    """Engine that samples replies in the format of its family; some are cut, some are garbage, all are
    marked."""

    def __init__(self, family: Family, chance: random.Random, *, is_canonical: bool) -> None:
        self._family = family
        self._chance = chance
        self._is_canonical = is_canonical
        self._num_replies = 0
        self.meant: ChatMessage | None = None  # what the last reply says; None: it is cut or garbage

    def generate(self, prompt_ids: NDArray[np.int32]) -> Generation:
        """Samples a reply; every log-probability occurs once, versions change within replies."""
        assert len(prompt_ids)
        self._num_replies += 1
        ids = self._sample()
        base = self._num_replies * 1000.0
        logprobs = -(np.arange(len(ids), dtype=np.float32) + np.float32(base))
        old = self._chance.randint(0, len(ids))
        spans = (
            TokenSpan(self._num_replies, "", old),
            TokenSpan(self._num_replies + 1, "", len(ids) - old),
        )
        reason = FinishReason.STOP if self.meant else FinishReason.LENGTH
        return Generation(ids, logprobs, tuple(s for s in spans if s.num_tokens), reason, None, 0)

    def _sample(self) -> NDArray[np.int32]:
        chance = self._chance
        ids = encoded(self._family, self._family.write(self._reply()))
        if self._is_canonical or chance.random() < 0.6:
            return ids
        self.meant = None
        if chance.random() < 0.5:
            return ids[: chance.randint(1, len(ids) - 1)]
        size = tokenizer(self._family).get_vocab_size()
        noise = [chance.randrange(size) for _ in range(chance.randint(1, 6))]
        return np.concatenate([encoded(self._family, self.mark()), np.array(noise, np.int32)])

    def _reply(self) -> ChatMessage:
        chance, family = self._chance, self._family
        calls = () if chance.random() < 0.45 else self._calls()
        thought = f"hm {self.mark()}" if family.thinks and chance.random() < 0.4 else ""
        content = f"{self.mark()}{chance.choice(_WORDS)}.".strip()
        if calls and (not family.content_with_calls or thought or chance.random() < 0.6):
            content = ""
        self.meant = ChatMessage("assistant", content, calls, reasoning=thought)
        return self.meant

    def _calls(self) -> tuple[ToolCall, ...]:
        num = self._chance.randint(1, self._family.max_calls)
        return tuple(self._call(f"{self._num_replies:04}{index:05}") for index in range(num))

    def _call(self, call_id: str) -> ToolCall:
        arguments = {"query": self._chance.choice(_WORDS) + self.mark(), "limit": 3}
        return ToolCall(call_id, "search", json.dumps(arguments, ensure_ascii=False))

    def mark(self) -> str:
        """Text that occurs nowhere else."""
        return f"Zq{self._num_replies}Z"


class Client:
    """Client that sends the whole conversation as text each time, as OpenAI clients do, with its own
    spelling."""

    def __init__(self, family: Family, chance: random.Random, *, keeps_reasoning: bool) -> None:
        self._family = family
        self._chance = chance
        self._keeps_reasoning = keeps_reasoning
        self.tools = TOOLS if chance.random() < 0.7 else ()
        self.messages: list[ChatMessage] = []
        if chance.random() < 0.5:
            self.messages.append(ChatMessage("system", self._words()))
        self.messages.append(ChatMessage("user", self._words()))

    def take(self, reply: ChatMessage) -> None:
        """Adds the reply in the spelling of this client, and the next messages."""
        calls = tuple(map(self._respelled, reply.tool_calls))
        reasoning = reply.reasoning if self._keeps_reasoning else ""
        self.messages.append(msgspec.structs.replace(reply, tool_calls=calls, reasoning=reasoning))
        for call in reply.tool_calls:
            self.messages.append(ChatMessage("tool", self._words(), tool_call_id=call.id))
        if not reply.tool_calls:
            if self._family.system_anywhere and self._chance.random() < 0.1:
                self.messages.append(ChatMessage("system", self._words()))
            self.messages.append(ChatMessage("user", self._words()))

    def _words(self) -> str:
        return " ".join(self._chance.choices(_WORDS, k=self._chance.randint(1, 3)))

    def _respelled(self, call: ToolCall) -> ToolCall:
        if self._keeps_reasoning:
            return call
        arguments = json.dumps(json.loads(call.arguments), sort_keys=True, indent=1)
        return ToolCall(call.id, call.name, arguments)


def turn(
    client: Client, engine: Engine, renderer: Renderer, ledger: Ledger, completion_id: str
) -> tuple[Prompt, Generation, ParsedReply]:
    """Records one call of the client."""
    prompt = ledger.prepare(client.messages, client.tools)
    generation = engine.generate(prompt.prompt_ids)
    parsed = renderer.parse_reply(generation.token_ids, client.tools, id_seed=completion_id)
    ledger.record(prompt, generation, parsed, completion_id)
    client.take(parsed.message)
    return prompt, generation, parsed
