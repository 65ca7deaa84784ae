"""Fidelity: the tokens of an episode are those that the engine read and sampled, for every template."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from tailrace.chat import ChatTemplate
from tailrace.ledger import Ledger
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.session import ExportStyle
from tests.unit.tailrace.chat.conversations import Client, Engine, guarded_renderer, turn
from tests.unit.tailrace.chat.families import FAMILIES, Family, card, encoded, tokenizer

NUM_CONVERSATIONS = 1000


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_tokens_of_an_episode_are_those_that_the_engine_saw_and_emitted(family: Family) -> None:
    renderer, guard = guarded_renderer(family)
    for number in range(NUM_CONVERSATIONS):
        chance = random.Random(number)
        client = Client(family, chance, keeps_reasoning=chance.random() < 0.5)
        engine = Engine(family, chance, is_canonical=False)
        ledger = Ledger(renderer)
        seen = np.empty(0, np.int32)
        sampled: dict[int, np.float32] = {}
        for index in range(chance.randint(1, 5)):
            prompt, generation, parsed = turn(client, engine, renderer, ledger, f"c{index}")
            assert np.array_equal(prompt.prompt_ids[: len(seen)], seen), "earlier tokens changed"
            assert np.array_equal(prompt.prompt_ids[len(seen) :], prompt.inserted_ids)
            begun = len(prompt.prompt_ids)
            sampled |= dict(enumerate(generation.inference_logprobs, begun))
            seen = np.concatenate([prompt.prompt_ids, generation.token_ids])
            if engine.meant is not None:
                assert without_ids(parsed.message) == without_ids(engine.meant)
        (row,) = ledger.rows(ExportStyle.CONCAT)
        assert np.array_equal(as_int32(row.token_ids), seen)
        places = np.flatnonzero(as_uint8(row.loss_mask))
        assert (
            dict(zip(places.tolist(), as_float32(row.inference_logprobs)[places], strict=True))
            == sampled
        )
        assert ledger.counts()["num_forks"] == 0
    assert guard.num_encoded > NUM_CONVERSATIONS


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_replies_as_the_template_writes_them_give_the_text_of_one_whole_rendering(
    family: Family,
) -> None:
    renderer, _ = guarded_renderer(family)
    names = {"bos_token": family.bos, "eos_token": family.eos}
    source = card(family).tokenizer_files["chat_template.jinja"].decode()
    template = ChatTemplate(source, names, "whole")
    num_compared = 0
    for number in range(100):
        chance = random.Random(number)
        client = Client(family, chance, keeps_reasoning=True)
        engine = Engine(family, chance, is_canonical=True)
        ledger = Ledger(renderer)
        for index in range(chance.randint(1, 5)):
            prompt, generation, _ = turn(client, engine, renderer, ledger, f"c{index}")
        messages = ledger.messages()
        if forgets_thoughts(messages):
            continue
        num_compared += 1
        ids = [*prompt.prompt_ids.tolist(), *generation.token_ids.tolist()]
        ours = tokenizer(family).decode(ids, skip_special_tokens=False)
        whole = template.render(messages, client.tools, add_generation_prompt=False)
        if family.name == "harmony":  # an earlier answer's end of turn is rendered as another token
            ours = ours.replace("<|return|>", "<|end|>", ours.count("<|return|>") - 1)
            ours = ours if not messages[-1].tool_calls else ours.replace("<|return|>", "<|end|>")
        assert ours == whole.rstrip("\n")
    assert num_compared > 20


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_inserted_tokens_are_those_of_the_whole_text_wherever_special_tokens_border_replies(
    family: Family,
) -> None:
    renderer, _ = guarded_renderer(family)
    for number in range(30):
        chance = random.Random(number)
        client = Client(family, chance, keeps_reasoning=True)
        engine = Engine(family, chance, is_canonical=True)
        ledger = Ledger(renderer)
        for index in range(3):
            prompt, _, _ = turn(client, engine, renderer, ledger, f"c{index}")
            text = tokenizer(family).decode(prompt.inserted_ids.tolist(), skip_special_tokens=False)
            assert np.array_equal(encoded(family, text), prompt.inserted_ids)


def without_ids(message: ChatMessage) -> ChatMessage:
    calls = tuple(msgspec.structs.replace(call, id="") for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def forgets_thoughts(messages: tuple[ChatMessage, ...]) -> bool:
    """True if templates may omit reasoning: before the last question or answer."""
    return any(message.reasoning for message in messages[:-1])
