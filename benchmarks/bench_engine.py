"""Tokens per second of the torch engine beside `model.generate`, vLLM and SGLang, and their adapters.

vLLM and SGLang compute the same jobs on the CPU, each in an environment and processes of its own, bare
and behind our adapter (`benchmarks/engine_rival.py`).

Run it with `make bench-engine`. Both sides compute the same requests with the same weights, on one
thread, in the same process and in turn. `generate` gets static batches in the order of the requests,
padded on the left, and only the tokens that were asked for count. The engine keeps so many requests in
flight, and the next one joins when one leaves; it also returns log-probabilities, which `generate` is
spared. The last row is the demo's load: 256 episodes at once, each turn some new prompt tokens and one
or two sampled tokens on top of a kept prefix of at most 60.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results import Results
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.generation import GenerateRequest, SamplingParams, TokenChunk

Forward = Literal["auto", "generic"]

VOCAB_SIZE = 119
DEMO_MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}

IN_FLIGHT = ((1, 6), (16, 64), (64, 192), (256, 512))  # and the number of jobs
RIVALS = {"vllm": 1.0, "sglang": 2.0}  # least ratio of our tokens/s to theirs
_GOAL_IN_FLIGHT = 64
_RIVAL_S = 3600.0
ROOT = Path(__file__).parents[1]

PACKAGES = ("tailrace", "torch", "transformers")


class Tensor(NamedTuple):
    """Weights that the engine stages."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Row(NamedTuple):
    """Tokens per second of both sides."""

    in_flight: int
    engine: float
    generate: float


class Job(NamedTuple):
    """One request of mixed length."""

    prompt: NDArray[np.int32]
    num_new: int


def make_model() -> Any:
    """The demo's model with seeded random weights."""
    torch.manual_seed(0)
    content = dict(DEMO_MODEL)
    make: Any = AutoModelForCausalLM.from_config
    config = AutoConfig.for_model(str(content.pop("model_type")), **content)
    return make(config, dtype=torch.float32).eval()


def make_engine(model: Any, config: InferenceConfig) -> TorchEngine:
    """An engine with the same weights."""
    engine = TorchEngine.from_config_json(json.dumps(DEMO_MODEL).encode(), config)
    engine.stage(weights(model), 0)
    engine.apply()
    return engine


def weights(model: Any) -> Iterator[Tensor]:
    """The model's parameters as bytes."""
    for name, parameter in model.named_parameters():
        data = memoryview(parameter.detach().contiguous().numpy()).cast("B")
        yield Tensor(name, "float32", tuple(parameter.shape), data)


def make_jobs(count: int) -> list[Job]:
    """Prompts of 8 to 64 tokens with 8 to 128 new ones."""
    rng = np.random.default_rng(1)
    sizes = zip(rng.integers(8, 65, count), rng.integers(8, 129, count), strict=True)
    return [
        Job(rng.integers(0, VOCAB_SIZE, prompt).astype(np.int32), int(new)) for prompt, new in sizes
    ]


def run_engine(engine: TorchEngine, jobs: list[Job], in_flight: int) -> int:
    """All jobs with at most `in_flight` at once; returns the tokens sampled."""
    waiting = list(enumerate(jobs))[::-1]
    sampled = 0

    def submit() -> None:
        index, job = waiting.pop()
        prompt = pack_int32(job.prompt)
        engine.submit(GenerateRequest(str(index), f"bench-{index}", prompt, job.num_new), on_chunk)

    def on_chunk(chunk: TokenChunk) -> None:
        nonlocal sampled
        assert chunk.error is None, chunk.error
        sampled += len(as_int32(chunk.token_ids))
        if chunk.finish_reason is not None and waiting:
            submit()

    for _ in range(min(in_flight, len(jobs))):
        submit()
    while engine.has_work():
        engine.step()
    return sampled


@torch.inference_mode()
def run_generate(model: Any, jobs: list[Job], batch_size: int) -> int:
    """All jobs in static batches; returns the tokens that were asked for."""
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        longest = max(len(job.prompt) for job in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prompt) :] = torch.from_numpy(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        num_new = max(job.num_new for job in batch)
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )
    return sum(job.num_new for job in jobs)


class Episodes:
    """The demo's load: each episode asks for its next turn as soon as the last one is answered."""

    def __init__(self, engine: TorchEngine, num_episodes: int, num_turns: int) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(2)
        self._history: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * num_episodes
        self._generation = [0] * num_episodes
        self._left = num_turns
        self.num_turns = 0
        for episode in range(num_episodes):
            self._turn(episode)

    def _turn(self, episode: int) -> None:
        self._left -= 1
        if len(self._history[episode]) > 60:
            self._history[episode] = np.empty(0, np.int32)
            self._generation[episode] += 1
        observed = self._rng.integers(2, VOCAB_SIZE, self._rng.integers(6, 9)).astype(np.int32)
        self._history[episode] = np.concatenate([self._history[episode], observed])
        call_id = f"{episode}.{self._generation[episode]}.{self.num_turns}"
        sampling = SamplingParams(seed=self._left, stop_token_ids=(1,))
        prompt = pack_int32(self._history[episode])
        request = GenerateRequest(
            call_id, f"{episode}.{self._generation[episode]}", prompt, 2, sampling
        )
        self._engine.submit(request, lambda chunk: self._answered(episode, chunk))

    def _answered(self, episode: int, chunk: TokenChunk) -> None:
        assert chunk.error is None, chunk.error
        self._history[episode] = np.concatenate([self._history[episode], as_int32(chunk.token_ids)])
        if chunk.finish_reason is not None:
            self.num_turns += 1
            if self._left > 0:
                self._turn(episode)


def run_turns(engine: TorchEngine, num_turns: int) -> int:
    """`num_turns` turns of 256 episodes; returns how many there were."""
    episodes = Episodes(engine, 256, num_turns)
    while engine.has_work():
        engine.step()
    return episodes.num_turns


def once(work: Callable[[], int]) -> float:
    """Units of `work` per second of wall time."""
    began_s = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - began_s)


def measure_tokens(model: Any, in_flight: int, count: int, repeats: int, forward: Forward) -> Row:
    """The best tokens/s of both sides over `repeats` alternating runs, after one that warms up."""
    jobs = make_jobs(count)
    engine = make_engine(model, InferenceConfig(max_running=in_flight, forward=forward))
    runs = [
        (
            once(lambda: run_engine(engine, jobs, in_flight)),
            once(lambda: run_generate(model, jobs, in_flight)),
        )
        for _ in range(repeats + 1)
    ][1:]
    return Row(in_flight, max(ours for ours, _ in runs), max(theirs for _, theirs in runs))


def measure_turns(model: Any, repeats: int, forward: Forward) -> float:
    """The best turns/s of the demo's load."""
    engine = make_engine(model, InferenceConfig(forward=forward))
    return max([once(lambda: run_turns(engine, 6000)) for _ in range(repeats + 1)][1:])


def compare(results: Results, rival: str, goal: float, rates: dict[int, Row], repeats: int) -> None:
    """Runs a rival in its environment; adds its rows and the targets."""
    python = ROOT / f".venv-{rival}" / "bin" / "python"
    paths = os.pathsep.join(str(ROOT / each) for each in ("protos", "shared", "services"))
    done = subprocess.run(
        [python, "-m", "benchmarks.engine_rival", rival, str(repeats)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_RIVAL_S,
    )
    for row in json.loads(done.stdout.splitlines()[-1]):
        ours = rates[row["in_flight"]].engine
        results.add(
            what=f"tokens/s of {rival}",
            in_flight=row["in_flight"],
            engine=ours,
            bare=row["bare"],
            adapter=row["adapter"],
            ratio=ours / row["bare"],
        )
        if row["in_flight"] == _GOAL_IN_FLIGHT:
            results.at_least(f"tokens/s at 64 in flight, times {rival}'s", ours / row["bare"], goal)
            lost = 1 - row["adapter"] / row["bare"]
            results.at_most(f"share of {rival}'s tokens/s that our adapter loses at 64", lost, 0.03)


def main() -> int:
    """Measure, print the table and write it; the exit code says whether the target holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forward", choices=("auto", "generic"), default="auto")
    parser.add_argument("--rivals", choices=("none", "vllm", "sglang"), nargs="*", default=[*RIVALS])
    args = parser.parse_args()
    args.rivals = {name: goal for name, goal in RIVALS.items() if name in args.rivals}
    torch.set_num_threads(1)
    model = make_model()
    results = Results("engine", PACKAGES, repeats=args.repeats, forward=args.forward)
    rates = {}
    for in_flight, count in IN_FLIGHT:
        row = measure_tokens(model, in_flight, count, args.repeats, args.forward)
        ratio = row.engine / row.generate
        rates[in_flight] = row
        results.add(
            what="tokens/s",
            in_flight=in_flight,
            engine=row.engine,
            generate=row.generate,
            ratio=ratio,
        )
    row = rates[_GOAL_IN_FLIGHT]
    results.at_least("tokens/s at 64 in flight, times model.generate's", row.engine / row.generate, 2.0)
    for rival, goal in args.rivals.items() if args.forward == "auto" else ():
        compare(results, rival, goal, rates, args.repeats)
    turns = measure_turns(model, args.repeats, args.forward)
    results.add(what="turns/s of the demo's load, 256 episodes", in_flight=256, engine=turns)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
