"""CPU of one agents worker per turn: thousands of FrozenLake episodes of six turns, a policy that
answers at once.

    python benchmarks/bench_agents.py [--baseline CHECKOUT]

`turn, core` plays episodes with a journal and a policy that cost nothing: environment, rendering,
ledger, rows. `turn, with leases` adds leases, continuation and requests (a client that answers in the
next tick).
The transport, Redis and the queue have benchmarks of their own. With a baseline, both checkouts are
measured in alternation, both with the garbage collection of a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Results, commit_of, median
from tailrace.channel.generation import Generation
from tailrace.channel.ports import Address
from tailrace.chat import Renderer
from tailrace.clock import SystemClock
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.sdk.agent_loop import LoopLimits
from tailrace.sdk.policy import Policy, TurnRequest
from tailrace_agents.core.env_loop import EnvPlayer
from tailrace_agents.core.environments import EnvPool
from tailrace_agents.core.machine import PhaseArgs, PlayContext
from tailrace_agents.core.model import EnvView
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.core.transcript import Transcript
from tailrace_agents.ports import NoJournal
from tailrace_envs import make_env
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.subjects import Phase
from tailrace_protos.weights import ModelCard

CONCURRENT = 512
ROWS = 1000  # episodes whose export of rows is measured
LIMITS = LoopLimits(8192, 4096, 64, 500, 0.0, 0.0, 0.0, 0)


class InstantPolicy:
    """Answers with the four directions in turn."""

    def __init__(self, renderer: Renderer) -> None:
        logprobs = np.full(2, -0.1, np.float32)
        replies = [renderer.reply_ids(word) for word in ("Right", "Down", "Left", "Up")]
        self._answers = itertools.cycle(
            [
                Generation(ids, logprobs, (TokenSpan(1, "", 2),), FinishReason.STOP, None, 0)
                for ids in replies
            ]
        )

    def next(self) -> Generation:
        """The next reply."""
        return next(self._answers)

    async def generate(self, request: TurnRequest) -> Generation:
        """The next reply, after a turn of the loop."""
        await asyncio.sleep(0)
        return next(self._answers)


class InstantCall:
    """A call that is answered in the next tick."""

    def __init__(self, answer: Generation) -> None:
        self._answer = answer

    async def collect(self) -> Generation:
        """The answer."""
        await asyncio.sleep(0)
        return self._answer


class InstantWorld:
    """`ServerPlacement` and `GenerateClient` without a network."""

    def __init__(self, policy: InstantPolicy) -> None:
        self._policy = policy

    async def lease(self, *args: Any) -> Address:
        """The only server."""
        return Address("s0")

    ask_after_s = math.inf

    def take(self, *args: Any) -> None:
        """Counts nothing."""

    def report_turn(self, *args: Any, is_over: bool) -> None:
        """Counts nothing."""

    def report_call(self, *args: Any) -> None:
        """Counts nothing."""

    def release(self, episode_id: str) -> None:
        """Counts nothing."""

    def generate(self, *args: Any) -> Any:
        """A call."""
        return InstantCall(self._policy.next())

    def release_prefix(self, *args: Any) -> None:
        """Counts nothing."""


class Played(NamedTuple):
    """Turns of all episodes, and the transcripts that are kept."""

    num_turns: int
    transcripts: list[Transcript]


async def play_all(
    model: TokenModel, num_episodes: int, num_concurrent: int, num_kept: int = 0
) -> Played:
    """Plays the episodes; exports the rows of all but the last `num_kept`."""
    pool = EnvPool(lambda: make_env("frozen_lake", {}))
    seeds = iter(range(num_episodes))
    args = PhaseArgs(SamplingParams(stop_token_ids=model.stop_token_ids), LIMITS.max_new_tokens)
    phases: dict[Phase, PhaseArgs] = {"train": args, "eval": args}
    context = PlayContext(phases, 8192, SystemClock(), Stages(), lambda: False)
    player = EnvPlayer(pool, context, model, LIMITS, EnvView())
    deadline_unix_s = time.time() + 600.0
    num_turns = 0
    kept: list[Transcript] = []

    async def play_some() -> None:
        nonlocal num_turns
        for seed in seeds:
            env_task = EnvTask("lake", seed % 1000)
            task = EpisodeTask(f"g{seed}.0", f"g{seed}", 0, 0, "train", env_task, deadline_unix_s)
            transcript = (await player.play(task, NoJournal())).transcript
            num_turns += transcript.num_turns
            if seed < num_episodes - num_kept:
                transcript.rows(1.0)
            else:
                kept.append(transcript)

    await asyncio.gather(*(play_some() for _ in range(num_concurrent)))
    return Played(num_turns, kept)


def measure(name: str, make: Callable[[], Policy], renderer: Renderer, num_episodes: int) -> None:
    """Prints the CPU of a turn.

    The clock of a process is a system call. It is read around all episodes, never within one.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play_all(TokenModel(renderer, make()), 500, 100))
        started_s = time.process_time()
        played = runner.run(play_all(TokenModel(renderer, make()), num_episodes, CONCURRENT))
        cpu_s = time.process_time() - started_s
    print(f"{name:8} {1e6 * cpu_s / played.num_turns:7.1f} us/turn")


def measure_rows(policy: Policy, renderer: Renderer) -> None:
    """Prints the CPU of the rows of an episode. Last: the kept episodes slow the garbage collector."""
    played = asyncio.run(play_all(TokenModel(renderer, policy), ROWS, 100, ROWS))
    started_s = time.process_time()
    for transcript in played.transcripts:
        transcript.rows(1.0)
    print(f"rows     {1e6 * (time.process_time() - started_s) / ROWS:7.1f} us/episode")


def measure_here(num_episodes: int) -> None:
    """Measures this process's code once."""
    with tempfile.TemporaryDirectory() as folder:
        build_frozen_lake_tokenizer(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    renderer = Renderer.from_model_card(ModelCard(b"{}", files))
    measure("core", lambda: InstantPolicy(renderer), renderer, num_episodes)

    def full() -> Policy:
        world = InstantWorld(InstantPolicy(renderer))
        return ContinuingPolicy(world, world, Stages())  # type: ignore[arg-type]

    measure("policy", full, renderer, num_episodes)
    measure_rows(InstantPolicy(renderer), renderer)


# Runs `main` of a script with the garbage collection of a worker, on a lake without holes. Commits
# draw different maps, whose episodes would share their fixed costs among different numbers of turns.
AS_A_WORKER = """
import runpy, sys
from tailrace.runtime.service import tame_garbage_collection
sys.argv = sys.argv[1:]
main = runpy.run_path(sys.argv[0], run_name="bench_agents")["main"]
names = main.__globals__
make_env = names["make_env"]
names["make_env"] = lambda kind, _: make_env(kind, {"p": 1.0, "split": "all", "max_turns": 6})
tame_garbage_collection()
main()
"""


def measured(python: str, script: Path, *arguments: str) -> dict[str, float]:
    """Runs a benchmark script in its own process; microseconds by name."""
    command = [python, "-c", AS_A_WORKER, str(script), *arguments]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: float(us) for name, us in re.findall(r"^(\w+)\s+([\d.]+) us/", told, re.MULTILINE)}


def compare(results: Results, num_rounds: int, num_episodes: int, baseline: Path | None) -> None:
    """Measures this checkout, and the baseline in alternation with it."""
    here, there = [], []
    for _ in range(num_rounds):
        if baseline is not None:
            python, script = baseline / ".venv/bin/python", baseline / "benchmarks/bench_agents.py"
            there.append(measured(str(python), script, "--episodes", str(num_episodes)))
        here.append(measured(sys.executable, Path(__file__), "--once", "--episodes", str(num_episodes)))
    ours = {name: median(one[name] for one in here) for name in here[0]}
    results.add(part="turn, core", us=ours["core"])
    results.add(part="turn, with leases", us=ours["policy"])
    results.add(part="rows of an episode", us=ours["rows"])
    results.at_most("microseconds for the rows of an episode", ours["rows"], 60.0)
    if baseline is None:
        return
    commit = commit_of(baseline)
    for name, part in (("core", "turn, core"), ("policy", "turn, with leases")):
        before = median(one[name] for one in there)
        results.add(part=part, us=before, commit=commit)
        pairs = zip(here, there, strict=True)  # the machine's speed drifts less within a pair
        ratio = median(now[name] / then[name] for now, then in pairs)
        results.at_most(f"{part}: times the baseline's", ratio, 1.1)


def main() -> int:
    """Measures, prints and writes the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--baseline", type=Path, help="checkout of another commit, with its .venv")
    parser.add_argument("--once", action="store_true", help="print one measurement of this checkout")
    args = parser.parse_args()
    if args.once:
        measure_here(args.episodes)
        return 0
    results = Results("agents", ("msgspec", "numpy", "uvloop"), episodes=args.episodes)
    compare(results, args.rounds, args.episodes, args.baseline)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
