"""The tool phase of TRL's own `GRPOTrainer`: `.venv-trl/bin/python benchmarks/tools/trl_loop.py 3`.

Whole training steps, one a round: 32 rollouts of a tiny random Qwen3. Only sampling is replaced: every
rollout asks for one tool call, then answers; TRL parses the call, runs the tool and renders its result.
A phase is from the first call's start to the last one's end: TRL's work around it does not count.
Prints one JSON object: seconds per round by the tool's kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

CALL_S = 0.05
NUM_ROLLOUTS = 32
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
REPLIES = (
    '<tool_call>\n{{"name": "{tool}", "arguments": {{}}}}\n</tool_call><|im_end|>',
    "done<|im_end|>",
)

calls: list[tuple[float, float]] = []


def block() -> str:
    """Block a thread, as a database query or an HTTP request of a plain library does.

    Returns:
        A word.
    """
    started_s = time.perf_counter()
    time.sleep(CALL_S)
    calls.append((started_s, time.perf_counter()))
    return "done"


async def wait() -> str:
    """Wait without blocking.

    Returns:
        A word.
    """
    started_s = time.perf_counter()
    await asyncio.sleep(CALL_S)
    calls.append((started_s, time.perf_counter()))
    return "done"


class FixedReplies(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with the same two replies for every rollout in the place of sampled ones."""

    tool_name = ""
    num_generated = 0

    def _generate_single_turn(self, prompt_ids: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        reply = REPLIES[self.num_generated % len(REPLIES)].format(tool=self.tool_name)
        self.num_generated += 1
        ids = self.processing_class(reply, add_special_tokens=False)["input_ids"]
        return [list(ids) for _ in prompt_ids], None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with the chat template for Qwen3 that TRL carries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIALS[1], pad_token=SPECIALS[2]
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def tiny_model(vocab_size: int) -> Qwen3ForCausalLM:
    """Random weights: nothing of them is measured."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
        )
    )


def phases_s(tool: Callable[..., Any], rounds: int, folder: str) -> list[float]:
    """Seconds of the tool phase in each of so many training steps."""
    tokenizer = byte_tokenizer()
    args = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_steps=rounds,
        per_device_train_batch_size=NUM_ROLLOUTS,
        num_generations=8,
        max_completion_length=512,
    )
    prompts = [
        {"prompt": [{"role": "user", "content": f"Task {number}"}]} for number in range(NUM_ROLLOUTS)
    ]
    trainer = FixedReplies(
        model=tiny_model(len(tokenizer)),
        reward_funcs=lambda completions, **kwargs: [
            float(index % 2) for index in range(len(completions))
        ],
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        tools=[tool],
    )
    trainer.tool_name = tool.__name__
    calls.clear()
    trainer.train()
    assert len(calls) == rounds * NUM_ROLLOUTS, f"{len(calls)} calls in {rounds} rounds"
    ordered = sorted(calls)
    steps = [ordered[start : start + NUM_ROLLOUTS] for start in range(0, len(ordered), NUM_ROLLOUTS)]
    return [max(end for _, end in step) - step[0][0] for step in steps]


def main() -> None:
    """Measure both kinds of tools."""
    rounds = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        phases = {tool.__name__: phases_s(tool, rounds, folder) for tool in (block, wait)}
    print(json.dumps({"trl": trl.__version__, "phase_s": phases}))


if __name__ == "__main__":
    main()
