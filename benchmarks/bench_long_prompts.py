"""Delay of an event loop that prepares 8 prompts of 128k tokens at once.

Prepares them as gateway and agents do. Prints two rows of JSON: tokens, seconds, and the worst
delay of the loop, with long texts encoded on the loop, to compare, and aside.
"""

import asyncio
import json
import time
from pathlib import Path

import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tailrace.chat import ChatArgs, Renderer
from tailrace.chat.long_texts import with_long_texts
from tailrace.ledger import Ledger
from tailrace_protos.chat import ChatMessage
from tailrace_protos.weights import ModelCard

NUM_PROMPTS, NUM_TOKENS = 8, 131_072
_TICK_S = 0.001
_DOCS = Path(__file__).parents[1] / "docs"
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_renderer(corpus: str) -> Renderer:
    """Builds a renderer with a byte-level tokenizer of 8,000 tokens, trained on the corpus."""
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
    return Renderer.from_model_card(ModelCard(b"{}", files), ChatArgs())


async def _worst_delay(worst: list[float]) -> None:
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        worst.append(time.monotonic() - due_s)


async def measure(renderer: Renderer, texts: list[str], *, aside: bool) -> dict[str, object]:
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


def main() -> None:
    """Print both rows."""
    corpus = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    renderer = build_renderer(corpus)
    num_repeats = 1 + NUM_TOKENS // len(renderer.encode(corpus))
    texts = [f"{number}\n" + corpus * num_repeats for number in range(NUM_PROMPTS)]
    for aside in (False, True):
        print(json.dumps(uvloop.run(measure(renderer, texts, aside=aside))))


if __name__ == "__main__":
    main()
