"""Four small families of chat models: template, tokenizer, and replies in their format."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tailrace.chat import ChatArgs, Renderer
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema
from tailrace_protos.weights import ModelCard

_CORPUS = [
    'user\n\nassistant\n\n\n{"name": "search", "arguments": {"query": "boats"}}\n</tool_call>',
    "system\nYou are a careful assistant.\n\n{\n}\n", "the weather in the harbour is fine, go left\n\n",
]  # fmt: skip
TOOLS = (
    ToolSchema(
        "search",
        "Search the web",
        {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    ),
    ToolSchema("now", "The time", {"type": "object", "properties": {}}),
)


class Family(NamedTuple):
    """Family of chat models. `write`: text of a reply with its end, as a model of the family samples
    it."""

    name: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    bos: str
    eos: str
    write: Callable[[ChatMessage], str]
    max_calls: int
    thinks: bool
    content_with_calls: bool
    system_anywhere: bool

    def __str__(self) -> str:
        return self.name


def _qwen(reply: ChatMessage) -> str:
    thought = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    ]
    return thought + "\n".join(filter(None, [reply.content, *calls])) + "<|im_end|>"


def _llama3(reply: ChatMessage) -> str:
    if not reply.tool_calls:
        return reply.content.strip() + "<|eot_id|>"
    call = reply.tool_calls[0]
    return f'{{"name": "{call.name}", "parameters": {call.arguments}}}<|eom_id|>'


def _mistral(reply: ChatMessage) -> str:
    calls = ", ".join(
        f'{{"name": "{call.name}", "arguments": {call.arguments}, "id": "{call.id}"}}'
        for call in reply.tool_calls
    )
    return reply.content + (f"[TOOL_CALLS][{calls}]" if calls else "") + "</s>"


def _harmony(reply: ChatMessage) -> str:
    text = ""
    if reply.reasoning:
        text += f"<|channel|>analysis<|message|>{reply.reasoning}<|end|><|start|>assistant"
    if not reply.tool_calls:
        return f"{text}<|channel|>final<|message|>{reply.content}<|return|>"
    if reply.content:
        text += f"<|channel|>commentary<|message|>{reply.content}<|end|><|start|>assistant"
    call = reply.tool_calls[0]
    header = f" to=functions.{call.name}<|channel|>commentary json<|message|>"
    return f"{text}{header}{call.arguments}<|call|>"


QWEN = Family(
    "qwen",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "", "<|im_end|>", _qwen, 3, True, True, True,
)  # fmt: skip
LLAMA3 = Family(
    "llama3",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
     "<|python_tag|>"),
    (), "<|begin_of_text|>", "<|eot_id|>", _llama3, 1, False, False, True,
)  # fmt: skip
MISTRAL = Family(
    "mistral",
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
     "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    (), "<s>", "</s>", _mistral, 3, False, True, False,
)  # fmt: skip
HARMONY = Family(
    "harmony",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    (), "", "<|return|>", _harmony, 1, True, True, False,
)  # fmt: skip
FAMILIES = (QWEN, LLAMA3, MISTRAL, HARMONY)


@cache
def tokenizer(family: Family) -> Tokenizer:
    """Byte-level BPE, merges of line feeds and JSON among them, with the family's own tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(_CORPUS * 3, trainer)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.added])
    return made


def card(family: Family) -> ModelCard:
    """The model's files."""
    template = Path(__file__).with_name("templates") / f"{family.name}.jinja"
    settings = {"bos_token": family.bos, "eos_token": family.eos}
    files = {
        "tokenizer.json": tokenizer(family).to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "chat_template.jinja": template.read_bytes(),
    }
    return ModelCard(b"{}", files)


@cache
def renderer(family: Family) -> Renderer:
    """Renderer of the family with automatic parsers."""
    return Renderer.from_model_card(card(family), ChatArgs())


def encoded(family: Family, text: str) -> NDArray[np.int32]:
    """Ids of a text, by a tokenizer other than the renderer's."""
    return np.array(tokenizer(family).encode(text, add_special_tokens=False).ids, np.int32)


def call(name: str, arguments: dict[str, object], call_id: str = "abcdefghi") -> ToolCall:
    """A tool call with canonical arguments."""
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))
