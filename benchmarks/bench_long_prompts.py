"""Delay of an event loop with 8 prompts of 128k tokens at once.

    make bench-long-prompts

`render` prepares them as gateway and agents do, with long texts encoded on the loop, to compare, and
aside. `gateway` sends them over HTTP to a gateway process with real NATS and Redis; its engine answers
at once. There `worst_loop_delay_ms` is the longest answer to a request for `/health` meanwhile, one
every 2 ms, so the client's own delay is in it; `late_timers` counts the gateway's own timers, four a
second, that were later than 50 ms.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.gateway.world import World, world_of
from benchmarks.results import Cell, Results
from tailrace.chat import ChatArgs, Renderer
from tailrace.chat.long_texts import with_long_texts
from tailrace.ledger import Ledger
from tailrace_protos.chat import ChatMessage
from tailrace_protos.weights import ModelCard

NUM_PROMPTS, NUM_TOKENS = 8, 131_072
NUM_ROUNDS = 5
MAX_DELAY_MS = 50.0
_TICK_S = 0.001
_PROBE_S = 0.002
_TIMERS = "tailrace_runtime_event_loop_delay_seconds"
_DOCS = Path(__file__).parents[1] / "docs"
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_card(corpus: str) -> ModelCard:
    """Builds a model's files: a byte-level tokenizer of 8,000 tokens, trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([corpus], trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<|im_start|>", _END)])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": _END}).encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
    }
    return ModelCard(b"{}", files)


async def _worst_delay(worst: list[float]) -> None:
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        worst.append(time.monotonic() - due_s)


async def measure(renderer: Renderer, texts: list[str], *, aside: bool) -> dict[str, Cell]:
    """Prepares all prompts at once; returns the row to print."""
    delays: list[float] = []
    watching = asyncio.create_task(_worst_delay(delays))
    await asyncio.sleep(0.1)
    delays.clear()
    began_s = time.monotonic()
    prepared = await asyncio.gather(*(_prompt(renderer, text, aside) for text in texts))
    took_s = time.monotonic() - began_s
    await asyncio.sleep(0.1)
    watching.cancel()
    return {
        "part": "render",
        "encoded": "aside" if aside else "on the loop",
        "num_prompts": len(texts),
        "num_tokens": min(prepared),
        "seconds": round(took_s, 3),
        "worst_loop_delay_ms": round(max(delays) * 1000, 1),
    }


async def _prompt(renderer: Renderer, text: str, aside: bool) -> int:
    ledger = Ledger(renderer)
    messages = (ChatMessage("user", text),)
    await asyncio.sleep(0)
    prompt = (
        await with_long_texts(lambda: ledger.prepare(messages)) if aside else ledger.prepare(messages)
    )
    return len(prompt.prompt_ids)


async def measure_gateway(card: ModelCard, texts: list[str]) -> dict[str, Cell]:
    """Sends all prompts at once to a gateway, several times; returns the row to print."""
    with tempfile.TemporaryDirectory() as folder:
        async with world_of(Path(folder), card) as world, httpx2.AsyncClient(timeout=120.0) as http:
            before = await _late_timers(http, world)
            delays_s: list[float] = []
            took_s = [await _round(http, world, texts, delays_s) for _ in range(NUM_ROUNDS)]
            after = await _late_timers(http, world)
    return {
        "part": "gateway",
        "encoded": "aside",
        "num_prompts": len(texts),
        "seconds": round(sorted(took_s)[NUM_ROUNDS // 2], 3),
        "worst_loop_delay_ms": round(max(delays_s) * 1000, 1),
        "num_timers": after[0] - before[0],
        "late_timers": after[1] - before[1],
    }


async def _round(
    http: httpx2.AsyncClient, world: World, texts: list[str], delays_s: list[float]
) -> float:
    sessions = [await world.open() for _ in texts]
    bodies = [
        json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        for text in texts
    ]
    probing = asyncio.create_task(_probe(sessions[0].base_url.removesuffix("/v1"), delays_s))
    began_s = time.monotonic()

    async def one(base_url: str, key: str, body: bytes) -> None:
        headers = {"authorization": f"Bearer {key}"}
        answer = await http.post(f"{base_url}/chat/completions", content=body, headers=headers)
        found: Any = answer.json()
        assert answer.status_code == 200, found
        assert found["usage"]["prompt_tokens"] >= NUM_TOKENS, found["usage"]

    await asyncio.gather(
        *(
            one(opened.base_url, opened.api_key, body)
            for opened, body in zip(sessions, bodies, strict=True)
        )
    )
    took_s = time.monotonic() - began_s
    probing.cancel()
    return took_s


async def _probe(url: str, delays_s: list[float]) -> None:
    async with httpx2.AsyncClient(timeout=120.0) as http:
        await http.get(f"{url}/health")  # connects
        while True:
            sent_s = time.monotonic()
            await http.get(f"{url}/health")
            delays_s.append(time.monotonic() - sent_s)
            await asyncio.sleep(_PROBE_S)


async def _late_timers(http: httpx2.AsyncClient, world: World) -> tuple[int, int]:
    """Timers of the gateway's loop, and those that were later than `MAX_DELAY_MS`."""
    page = (await http.get(world.metrics_url)).text
    samples = {
        (one.name, one.labels.get("le", "")): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }
    whole = samples[f"{_TIMERS}_count", ""]
    return int(whole), int(whole - samples[f"{_TIMERS}_bucket", str(MAX_DELAY_MS / 1000)])


def main() -> int:
    """Measure, show and write."""
    corpus = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    card = build_card(corpus)
    renderer = Renderer.from_model_card(card, ChatArgs())
    num_repeats = 1 + NUM_TOKENS // len(renderer.encode(corpus))
    text = renderer.decode(renderer.encode(corpus * num_repeats)[:NUM_TOKENS])
    texts = [f"{number}\n{text}" for number in range(NUM_PROMPTS)]
    results = Results("long_prompts", ("tailrace", "tokenizers", "uvloop"), rounds=NUM_ROUNDS)
    for aside in (False, True):
        row = uvloop.run(measure(renderer, texts, aside=aside))
        results.add(**row)
    results.at_most(
        "render: worst delay of the loop, ms", float(row["worst_loop_delay_ms"] or 0), MAX_DELAY_MS
    )
    row = uvloop.run(measure_gateway(card, texts))
    results.add(**row)
    results.at_most(
        "gateway: longest wait for /health, ms", float(row["worst_loop_delay_ms"] or 0), MAX_DELAY_MS
    )
    results.at_most("gateway: timers later than 50 ms", float(row["late_timers"] or 0), 0)
    results.show()
    sys.stdout.write(f"{results.write()}\n")
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
