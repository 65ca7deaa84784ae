"""Workloads from files: a run's events, rounds of sessions, groups of a benchmark, quantiles."""

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from tailrace.config import ConfigError
from tailrace_cli.event_log import log_of, read_events
from tailrace_cli.simulation.reading import MOST_TOKENS, Seconds, Tokens, decoded, text_of
from tailrace_cli.simulation.rounds import (
    has_rounds,
    plans_of_rounds,
    rounds_of_csv,
    rounds_of_lines,
)
from tailrace_cli.simulation.workload import NORMAL, EpisodePlan, TurnPlan, Workload, correlated
from tailrace_protos.event import EpisodeSettled

TAU_TOOL_S = 2.0  # median wait of a tool call; the trace has none
_TOOL_CALLED = 1.0  # stands for it there

_Quantiles = Annotated[list[Annotated[float, Meta(ge=0, le=MOST_TOKENS)]], Meta(min_length=1)]


class _Episode(Struct):
    task: int
    turns: Annotated[list[tuple[Tokens, Tokens, Seconds]], Meta(min_length=1)]  # new, sampled, wait


class _Json(Struct):
    """A file of groups or of quantiles."""

    episodes: Annotated[list[_Episode], Meta(min_length=1)] | None = None
    output_tokens_quantiles: _Quantiles | None = None
    input_tokens_quantiles: _Quantiles | None = None


def load_trace(path: Path, scale: float = 1.0) -> Workload:
    """Read a workload; `scale` multiplies its tokens. Raises `ConfigError` for what it cannot read."""
    if path.is_dir():
        return _of_run(path, scale)
    if not path.is_file():
        raise ConfigError(
            f"--trace {path}: there is no such file; give a run's directory, or a .csv, .jsonl or "
            ".json file"
        )
    unpacked = Path(path.name.removesuffix(".gz"))
    match unpacked.suffix:
        case ".csv":
            return _of_plans(unpacked.stem, path, plans_of_rounds(rounds_of_csv(path), scale))
        case ".jsonl" if path.name != "events.jsonl" and has_rounds(path):
            return _of_plans(unpacked.stem, path, plans_of_rounds(rounds_of_lines(path), scale))
        case ".jsonl" if path == path.with_name(unpacked.name):
            return _of_run(path, scale)
        case ".json":
            return _of_json(unpacked.stem, path, scale)
    raise ConfigError(
        f"--trace {path}: is no trace; give a .csv, .jsonl or .json file, plain or as .gz, in a form "
        "of docs/sizing.md, or the directory of a run"
    )


def _of_plans(name: str, path: Path, plans: list[EpisodePlan]) -> Workload:
    if not plans:
        raise ConfigError(f"--trace {path}: holds no round; give at least one")
    return _of_groups(name, [[plan] for plan in plans])


def _of_json(name: str, path: Path, scale: float) -> Workload:
    remedy = "give a file in the form of benchmarks/scheduling/traces"
    content = decoded(text_of("--trace", path), _Json, f"--trace {path}", remedy)
    if content.output_tokens_quantiles is not None:
        inputs = content.input_tokens_quantiles or [512.0]
        return _quantiles(name, content.output_tokens_quantiles, inputs, scale)
    if content.episodes is not None:
        return _of_groups(name, _tasks(content.episodes, scale), draws_waits=True)
    raise ConfigError(f"--trace {path}: needs the key `episodes` or `output_tokens_quantiles`")


def _of_run(path: Path, scale: float) -> Workload:
    """Trained episodes of a run, in their groups; the turns of an episode are made equal."""
    groups: dict[str, list[EpisodePlan]] = defaultdict(list)
    for event in read_events(log_of(str(path), str(path.parent))):
        body = event.body
        if isinstance(body, EpisodeSettled) and body.phase == "train" and body.context_tokens > 0:
            groups[body.group_id].append(_even_turns(body, scale))
    if not groups:
        raise ConfigError(f"--trace {path}: no train episode has ended with tokens; take a longer run")
    return _of_groups(path.stem, list(groups.values()))


def _even_turns(episode: EpisodeSettled, scale: float) -> EpisodePlan:
    count, stages = max(episode.num_turns, 1), episode.stages
    engine_s = (stages.prefill_s or 0.0) + (stages.decode_s or 0.0) + stages.reward_s
    outside_s = max(episode.finished_unix_s - episode.started_unix_s - engine_s, 0.0)
    replies = _in_parts(scale * episode.num_sampled_tokens, count)
    news = _in_parts(scale * (episode.context_tokens - episode.num_sampled_tokens), count)
    waits = [outside_s / (count - 1)] * (count - 1) if count > 1 else []
    return tuple(map(TurnPlan, news, replies, [*waits, 0.0]))


def _in_parts(tokens: float, count: int) -> list[int]:
    """Splits a number of tokens; each part has at least one."""
    ends = [round(max(tokens, count) * place / count) for place in range(count + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _tasks(episodes: list[_Episode], scale: float) -> list[list[EpisodePlan]]:
    tasks: dict[int, list[EpisodePlan]] = defaultdict(list)
    for episode in episodes:
        turns = [
            TurnPlan(max(int(scale * new), 1), max(int(scale * out), 1), tool_s)
            for new, out, tool_s in episode.turns
        ]
        turns[-1] = turns[-1]._replace(tool_s=0.0)
        tasks[episode.task].append(tuple(turns))
    return list(tasks.values())


def _of_groups(name: str, groups: list[list[EpisodePlan]], *, draws_waits: bool = False) -> Workload:
    """Draw a recorded group and its members with replacement.

    With `draws_waits`, waits of 1 s stand for a tool call.
    """
    plans = [plan for group in groups for plan in group]
    longest = max(sum(one.input_tokens + one.output_tokens for one in plan) for plan in plans)

    def draw(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
        group = groups[int(rng.integers(len(groups)))]
        return [member(rng, group) for _ in range(members)]

    def member(rng: np.random.Generator, group: list[EpisodePlan]) -> EpisodePlan:
        plan = group[int(rng.integers(len(group)))]
        return _with_waits(rng, plan) if draws_waits else plan

    return Workload(name, longest, draw)


def _with_waits(rng: np.random.Generator, plan: EpisodePlan) -> EpisodePlan:
    return tuple(
        turn._replace(tool_s=TAU_TOOL_S * math.exp(1.2 * rng.standard_normal()))
        if turn.tool_s == _TOOL_CALLED
        else turn
        for turn in plan
    )


def _quantiles(name: str, outputs: list[float], inputs: list[float], scale: float) -> Workload:
    lengths = np.maximum(scale * np.array(sorted(outputs)), 1)
    prompt = max(int(scale * np.median(inputs)), 1)

    def draw(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
        ranks = [NORMAL.cdf(one) * (len(lengths) - 1) for one in correlated(rng, members)]
        return [(TurnPlan(prompt, int(lengths[round(rank)]), 0.0),) for rank in ranks]

    return Workload(name, int(lengths[-1]) + prompt, draw)
