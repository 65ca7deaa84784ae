"""A tiny model for sums: its tokenizer, and demonstrations for its warm start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sums import ASK, WORDS, draw_question, is_held_out, random_replies
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tailrace.chat import Renderer
from tailrace.toolbox.calculator import calculate
from tailrace_protos.chat import ChatMessage, ToolCall

PAD, UNK, USER, ASSISTANT, TOOL, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|unk|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
CALL_HEAD = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CALL_TAIL = '"}}\n</tool_call>'
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}"
    "{{- '<tool_call>\n' + (said | tojson) + '\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer(directory: str | Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` of a model for sums.

    One token per digit, sign and word of the question, and one each for what surrounds the expression
    in a tool call.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    phrases = [CALL_HEAD, CALL_TAIL, ASK, *(f" {word} " for word in WORDS)]
    characters = [*"0123456789", *WORDS.values(), "?"]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *phrases, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    known = "|".join(re.escape(token) for token in (*phrases, *characters))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"{known}|[^0-9]+"), behavior="isolated"
    )  # any other text, such as an error of the tool, is one unknown token
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNK,
        "eos_token": END,
        "additional_special_tokens": [USER, ASSISTANT, TOOL],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def demonstrations(
    renderer: Renderer, *, seed: int, num_episodes: int, calls: float = 0.8, skill: float = 0.0
) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of token ids and loss mask, both [T], of a player that knows the format alone.

    It calls the calculator with any numbers of the question and any sign, and answers with any number
    that it has seen (`sums.random_replies`). `calls`: probability of a call before the answer.
    `skill`: share of episodes that are played right, for tests that train for seconds only.
    """
    random = np.random.default_rng(seed)
    num_made = 0
    while num_made < num_episodes:
        question, expression = draw_question(random)
        if is_held_out(question):
            continue
        num_made += 1
        is_right = random.random() < skill
        right = [expression, calculate(expression)]
        yield _episode(
            renderer, question, right if is_right else random_replies(random, question, calls)
        )


def _episode(renderer: Renderer, question: str, said: list[str]) -> tuple[list[int], list[int]]:
    messages = [ChatMessage("user", question)]
    inserted = renderer.opening_ids(messages)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for place, text in enumerate(said):
        calls_tool = place + 1 < len(said)
        reply = renderer.reply_ids(f"{CALL_HEAD}{text}{CALL_TAIL}" if calls_tool else text)
        token_ids += [*inserted.tolist(), *reply.tolist()]
        loss_mask += [0] * len(inserted) + [1] * len(reply)
        if calls_tool:
            call = ToolCall(f"call-{place}", "calculator", json.dumps({"expression": text}))
            messages.append(ChatMessage("assistant", tool_calls=(call,)))
            answer = ChatMessage("tool", calculate(text), tool_call_id=call.id, name=call.name)
            inserted = renderer.continuation_ids(messages, [answer], closed=True)
            messages.append(answer)
    return token_ids, loss_mask
