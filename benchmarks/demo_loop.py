"""The yardstick: the demo's recipe as one process that rolls out, trains and evaluates in turn.

Same environment, chat rendering, model and settings as the full system, none of its queues.
`python -m benchmarks.demo_loop --seeds 0 1 2` prints a JSON object per seed. `lag` rolls out
with the weights of so many steps ago, which is how an asynchronous run trains.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.demo_model import KvSampler, Weights, build_model, snapshot
from benchmarks.demo_rollout import Episode, play_episodes
from tailrace.chat import Renderer
from tailrace_envs.frozen_lake_expert import demonstrations
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos.weights import ModelCard

MAX_SLOTS = 112
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Recipe:
    """Settings; the defaults are the demo's."""

    groups_per_step: int = 16
    group_size: int = 8
    mini_batches: int = 1
    max_steps: int = 200
    learning_rate: float = 5e-4
    lr_decay: float = 0.1  # learning rate at the last step as a share of the first, linear
    weight_decay: float = 0.1
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_ratio: float = 2.0  # truncation of the importance weight against the sampler
    decoupled: bool = False  # clip against the learner's own start of step, times the truncated weight
    entropy_loss_coef: float = 0.03
    norm_std: bool = True
    seq_mean: bool = False  # aggregate per episode first
    counts_all: bool = True  # groups of equal rewards are in the divisor of the loss
    lag: int = 0
    warm_start_steps: int = 480
    warm_start_episodes: int = 32
    warm_start_learning_rate: float = 3e-3
    warm_start_weight_decay: float = 0.01
    random_moves: float = 0.05
    eval_steps: int = 25
    eval_tasks: int = 247  # of the first and the last evaluation
    eval_interim_tasks: int = 128  # of those between
    eval_group_size: int = 2  # sampled episodes of a task; a greedy one is played beside
    micro_tokens: int = 6144
    stop_at: float = 2.0  # success rate at which to stop early


@dataclass
class Batch:
    """Rows padded on the right, all [rows, T - 1]: what is seen, what follows, and its weights."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    advantages: Tensor
    inference_logprobs: Tensor


class Loop:
    """One seed's run."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe, self.seed = recipe, seed
        random.seed(seed)
        with tempfile.TemporaryDirectory() as directory:
            self.renderer, vocab_size = _load_renderer(Path(directory))
        self.model = build_model(vocab_size, seed)
        num_train = recipe.groups_per_step * recipe.group_size
        rows = max(num_train, recipe.eval_tasks * recipe.eval_group_size)
        self.sampler = KvSampler(self.model, rows, MAX_SLOTS)
        self.next_seed = seed * 1_000_003
        self.train_success: list[float] = []
        self.curve: list[dict[str, float]] = []

    def run(self) -> dict[str, object]:
        """Warm start, reinforcement learning, evaluations; returns times and success rates."""
        recipe = self.recipe
        begin = time.perf_counter()
        warm_loss = self.warm_start()
        warm_start_s = time.perf_counter() - begin
        self._evaluate(0, recipe.eval_tasks, 0.0, 0.0)
        rl_s = eval_s = 0.0
        optimizer = self._optimizer(recipe.learning_rate, recipe.weight_decay)
        weights = deque([snapshot(self.model)], maxlen=recipe.lag + 1)
        num_tokens = 0
        for step in range(1, recipe.max_steps + 1):
            begin = time.perf_counter()
            num_tokens += self._step(step, optimizer, weights)
            rl_s += time.perf_counter() - begin
            is_last = step == recipe.max_steps
            if is_last or (recipe.eval_steps and step % recipe.eval_steps == 0):
                num_tasks = recipe.eval_tasks if is_last else recipe.eval_interim_tasks
                eval_s += self._evaluate(step, num_tasks, rl_s, eval_s)
                if self.curve[-1]["success_rate"] >= recipe.stop_at:
                    break
        return {
            "seed": self.seed,
            "warm_start_s": warm_start_s,
            "warm_start_loss": warm_loss,
            "warm_start_success": self.curve[0]["success_rate"],
            "warm_start_greedy": self.curve[0]["greedy_success_rate"],
            "rl_s": rl_s,
            "eval_s": eval_s,
            "num_sampled_tokens": num_tokens,
            "success_rate": self.curve[-1]["success_rate"],
            "greedy_success_rate": self.curve[-1]["greedy_success_rate"],
            **self._time_to(0.8),
            "curve": self.curve,
        }

    def _time_to(self, goal: float) -> dict[str, float | None]:
        """Seconds of reinforcement learning up to the first weights that reach `goal`."""
        for point in self.curve:
            if point["success_rate"] >= goal:
                with_eval_s = point["rl_s"] + point["eval_s"]
                return {
                    "to_goal_s": point["rl_s"],
                    "to_goal_with_eval_s": with_eval_s,
                    "to_goal_step": point["step"],
                }
        return {"to_goal_s": None, "to_goal_with_eval_s": None, "to_goal_step": None}

    def warm_start(self) -> float:
        """Imitate demonstrations; the last step's loss."""
        recipe = self.recipe
        rows = demonstrations(
            self.renderer,
            seed=self.seed,
            num_episodes=recipe.warm_start_steps * recipe.warm_start_episodes,
            random_moves=recipe.random_moves,
        )
        optimizer = self._optimizer(recipe.warm_start_learning_rate, recipe.warm_start_weight_decay)
        loss = 0.0
        for step in range(recipe.warm_start_steps):
            share = _warm_start_share(step, recipe.warm_start_steps)
            _set_learning_rate(optimizer, recipe.warm_start_learning_rate * share)
            chunk = sorted(islice(rows, recipe.warm_start_episodes), key=lambda row: len(row[0]))
            num_targets = sum(sum(mask) for _, mask in chunk)
            loss = 0.0
            for part in _parts([len(ids) for ids, _ in chunk], recipe.micro_tokens):
                ids = _pad([torch.tensor(chunk[index][0]) for index in part])
                mask = _pad([torch.tensor(chunk[index][1]) for index in part])[:, 1:].bool()
                logprobs, _ = self._logprobs(ids[:, :-1], ids[:, 1:], mask)
                part_loss = -logprobs.sum() / num_targets
                torch.autograd.backward(part_loss)
                loss += part_loss.item()
            self._apply(optimizer)
        return loss

    def _step(self, step: int, optimizer: torch.optim.Optimizer, weights: deque[Weights]) -> int:
        """Roll out with the oldest of `weights`, train, append the new ones; tokens sampled."""
        recipe = self.recipe
        share = 1.0 + (recipe.lr_decay - 1.0) * (step - 1) / max(1, recipe.max_steps - 1)
        _set_learning_rate(optimizer, recipe.learning_rate * share)
        self.sampler.load(weights[0])
        seeds = range(self.next_seed, self.next_seed + recipe.groups_per_step)
        self.next_seed += recipe.groups_per_step
        tasks = [seed for seed in seeds for _ in range(recipe.group_size)]
        episodes = play_episodes(self.sampler, self.renderer, {}, tasks)
        self.train_success.append(float(np.mean([episode.success for episode in episodes])))
        kept = _informative(episodes, recipe)
        random.shuffle(kept)
        count = -(-len(kept) // recipe.mini_batches)
        for first in range(0, len(kept), max(count, 1)):
            part = kept[first : first + count]
            divided = episodes if recipe.counts_all else [episode for episode, _ in part]
            share = recipe.mini_batches if recipe.counts_all else 1
            self._update(part, optimizer, _num_sampled(divided) / share, len(divided) / share)
        weights.append(snapshot(self.model))
        return _num_sampled(episodes)

    def _update(
        self,
        rows: list[tuple[Episode, float]],
        optimizer: torch.optim.Optimizer,
        num_targets: float,
        num_rows: float,
    ) -> None:
        """Make one update; `num_targets` tokens or `num_rows` episodes divide the loss."""
        rows = sorted(rows, key=lambda row: len(row[0].token_ids))
        for part in _parts([len(episode.token_ids) for episode, _ in rows], self.recipe.micro_tokens):
            batch = _batch([rows[index] for index in part])
            weights = 1.0 / num_targets * torch.ones_like(batch.mask, dtype=torch.float32)
            if self.recipe.seq_mean:
                weights = (1.0 / num_rows / batch.mask.sum(1, keepdim=True)).expand_as(batch.mask)
            torch.autograd.backward(self._loss(batch, weights[batch.mask]))
        self._apply(optimizer)

    def _loss(self, batch: Batch, weights: Tensor) -> Tensor:
        recipe, mask = self.recipe, batch.mask
        logprobs, entropy = self._logprobs(batch.inputs, batch.targets, mask)
        advantages = batch.advantages[mask]
        behaviour = torch.exp(logprobs.detach() - batch.inference_logprobs[mask])
        if recipe.decoupled:
            gain = behaviour.clamp(max=recipe.max_ratio) * advantages * logprobs
        else:
            ratio = torch.exp(logprobs - batch.inference_logprobs[mask])
            clipped = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
            gain = torch.minimum(ratio * advantages, clipped * advantages)
        return -((gain + recipe.entropy_loss_coef * entropy) * weights).sum()

    def _logprobs(self, inputs: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the masked targets, [masked tokens]."""
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state[mask]
        logprobs = functional.log_softmax(self.model.lm_head(hidden), dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets[mask][:, None])[:, 0], entropy

    def _optimizer(self, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=learning_rate,
            betas=(0.9, self.recipe.beta2),
            weight_decay=weight_decay,
            fused=True,
        )

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _evaluate(self, step: int, num_tasks: int, rl_s: float, eval_s: float) -> float:
        """Append a point to the curve, `eval_s` being that of earlier ones; the seconds it took."""
        begin = time.perf_counter()
        self.sampler.load(snapshot(self.model))
        tasks = [seed for seed in range(num_tasks) for _ in range(self.recipe.eval_group_size)]
        success_rate = self._held_out_success(tasks, greedy=False)
        greedy_success_rate = self._held_out_success(range(num_tasks), greedy=True)
        took_s = time.perf_counter() - begin
        point = {
            "step": step,
            "success_rate": success_rate,
            "greedy_success_rate": greedy_success_rate,
            "train_success_rate": float(np.mean(self.train_success)) if step else 0.0,
            "rl_s": rl_s,
            "eval_s": eval_s,
        }
        self.train_success.clear()
        self.curve.append(point)
        print(f"seed {self.seed} {json.dumps(point)}", file=sys.stderr)
        return took_s

    def _held_out_success(self, seeds: Sequence[int], *, greedy: bool) -> float:
        held_out = {"split": "held_out"}
        episodes = play_episodes(self.sampler, self.renderer, held_out, seeds, greedy=greedy)
        return float(np.mean([episode.success for episode in episodes]))


def _load_renderer(directory: Path) -> tuple[Renderer, int]:
    build_frozen_lake_tokenizer(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    vocab_size = len(json.loads(files["tokenizer.json"])["model"]["vocab"])
    return Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files)), vocab_size


def _warm_start_share(step: int, num_steps: int) -> float:
    """The learning rate's share of its peak: up over five steps, then a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, num_steps - WARM_UP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _num_sampled(episodes: Sequence[Episode]) -> int:
    return sum(sum(episode.loss_mask) for episode in episodes)


def _informative(episodes: list[Episode], recipe: Recipe) -> list[tuple[Episode, float]]:
    """Episodes of the groups whose rewards differ, with their advantages."""
    rewards = np.array([episode.reward for episode in episodes]).reshape(-1, recipe.group_size)
    spread = rewards.std(1, ddof=1, keepdims=True)
    advantages = rewards - rewards.mean(1, keepdims=True)
    if recipe.norm_std:
        advantages = advantages / (spread + 1e-6)
    kept = np.broadcast_to(spread > 0, rewards.shape).ravel()
    return [
        (episode, float(advantage))
        for episode, advantage, keep in zip(episodes, advantages.ravel(), kept, strict=True)
        if keep
    ]


def _parts(lengths: list[int], max_tokens: int) -> list[range]:
    """Consecutive rows (ascending lengths) that fit `max_tokens` when padded to the longest."""
    parts, first = [], 0
    for index, length in enumerate(lengths):
        if (index + 1 - first) * length > max_tokens and index > first:
            parts.append(range(first, index))
            first = index
    parts.append(range(first, len(lengths)))
    return parts


def _pad(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def _batch(rows: list[tuple[Episode, float]]) -> Batch:
    token_ids = _pad([torch.tensor(episode.token_ids) for episode, _ in rows])
    mask = _pad([torch.tensor(episode.loss_mask) for episode, _ in rows])[:, 1:].bool()
    logprobs = _pad([torch.tensor(episode.inference_logprobs) for episode, _ in rows])[:, 1:]
    advantages = torch.tensor([advantage for _, advantage in rows])[:, None].expand_as(mask)
    return Batch(token_ids[:, :-1], token_ids[:, 1:], mask, advantages, logprobs)


def main() -> None:
    """Parse the recipe and run each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    for field in dataclasses.fields(Recipe):
        kind = _boolean if field.type == "bool" else {"int": int, "float": float}[str(field.type)]
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    torch.set_num_threads(arguments.pop("threads"))
    seeds = arguments.pop("seeds")
    for seed in seeds:
        print(json.dumps(Loop(Recipe(**arguments), seed).run()), flush=True)


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


if __name__ == "__main__":
    main()
