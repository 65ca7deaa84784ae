"""TRL's own `GRPOTrainer` on the same model: `python -m benchmarks.learner.trl_side steps 3`.

`steps`: seconds of so many optimizer steps over the rows of `task`, by TRL's own `training_step`; only
where the rows come from is replaced. `digits`: whole training, with this seed, until the mean reward of
a step reaches the goal. Prints one JSON object. Runs in `.venv-trl`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learner import task
from benchmarks.learner.task import Sample

SAMPLES = {"ragged": task.ragged_samples, "grouped": task.grouped_samples}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, in the order of the alphabet's characters; then padding and the end."""
    to_char = {byte: char for char, byte in _byte_of_char().items()}
    vocab = {to_char[byte]: byte for byte in range(256)}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others follow from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    plain = {chr(byte): byte for byte in shown}
    return plain | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def make_model() -> Qwen3ForCausalLM:
    """Seeded random weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**task.MODEL))


def make_args(folder: str, **settings: Any) -> GRPOConfig:
    """The hyper-parameters that both sides have."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_generations=task.GROUP_SIZE,
        max_completion_length=task.MAX_NEW_TOKENS,
        beta=0.0,
        epsilon=0.2,
        logging_steps=1000,
        **settings,
    )


class GivenRows(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer on rows that are there already, so many a pass."""

    passes: Sequence[dict[str, Any]] = ()
    num_taken = 0

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        self.num_taken += 1
        return self.passes[(self.num_taken - 1) % len(self.passes)]


def inputs_of(samples: Sequence[Sample], num_items: int) -> dict[str, Any]:
    """Padded as TRL pads: prompts on the left, completions on the right."""
    prompt_len = max(len(sample.prompt) for sample in samples)
    completion_len = max(len(sample.completion) for sample in samples)
    parts: dict[str, list[Any]] = {}
    for sample in samples:
        before = prompt_len - len(sample.prompt)
        after = (0, completion_len - len(sample.completion))
        row = {
            "prompt_ids": np.pad(sample.prompt, (before, 0), constant_values=task.PAD_ID),
            "prompt_mask": np.pad(np.ones_like(sample.prompt), (before, 0)),
            "completion_ids": np.pad(sample.completion, after, constant_values=task.PAD_ID),
            "completion_mask": np.pad(np.ones_like(sample.completion), after),
            "old_per_token_logps": np.pad(sample.logprobs, after),
            "advantages": np.float32(sample.advantage),
        }
        for name, value in row.items():
            parts.setdefault(name, []).append(value)
    stacked = {name: torch.from_numpy(np.stack(values)) for name, values in parts.items()}
    return {**stacked, "num_items_in_batch": torch.tensor(num_items)}


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Wall and processor seconds of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it."""
        wall, cpu = self._began
        self.steps.append((time.perf_counter() - wall, time.process_time() - cpu))


def step_times(kind: str, rounds: int, folder: str) -> list[tuple[float, float]]:
    """Of so many steps, after one that warms up."""
    samples = SAMPLES[kind]()
    count = sum(len(sample.completion) for sample in samples)
    size = task.ROWS_PER_PASS
    num_passes = len(samples) // size
    args = make_args(
        folder,
        max_steps=rounds + 1,
        learning_rate=1e-6,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=num_passes,
    )
    clock = StepClock()
    trainer = GivenRows(
        model=make_model(),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 1024),
        processing_class=byte_tokenizer(),
        callbacks=[clock],
    )
    starts = range(0, len(samples), size)
    trainer.passes = [inputs_of(samples[start : start + size], count) for start in starts]
    trainer.train()
    return clock.steps[1:]


class Stop(TrainerCallback):  # type: ignore[misc]
    """End the training when a step's mean reward has reached the goal."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.times_s: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Look at the step's rewards."""
        self.times_s.append(time.perf_counter() - self.began_s)
        control.should_training_stop = self.rewards[-1] >= task.GOAL
        return control


def digits(seed: int, folder: str) -> dict[str, Any]:
    """Rewards and seconds up to the goal."""
    stop = Stop()

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        rewards = [task.digit_share(text) for text in completions]
        stop.rewards.append(sum(rewards) / len(rewards))
        return rewards

    args = make_args(
        folder,
        max_steps=task.MAX_STEPS,
        learning_rate=task.LEARNING_RATE,
        per_device_train_batch_size=len(task.PROMPTS) * task.GROUP_SIZE,
        temperature=1.0,
        seed=seed,
    )
    set_seed(seed)
    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task.PROMPTS] * 1024),
        processing_class=byte_tokenizer(),
        callbacks=[stop],
    )
    trainer.train()
    return {"rewards": stop.rewards, "times_s": stop.times_s}


def main() -> None:
    """Do what the command line says."""
    what, number = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        if what == "digits":
            answer = digits(number, folder)
        else:
            answer = {kind: step_times(kind, number, folder) for kind in SAMPLES}
    print(json.dumps({"trl": trl.__version__, "threads": torch.get_num_threads(), **answer}))


if __name__ == "__main__":
    main()
