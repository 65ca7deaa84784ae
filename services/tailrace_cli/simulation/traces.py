"""Workloads from files: a run's events, TraceLab's replay format, groups of a benchmark, quantiles."""

import csv
import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from tailrace.config import ConfigError
from tailrace_cli.event_log import log_of, read_events
from tailrace_cli.simulation.workload import NORMAL, EpisodePlan, TurnPlan, Workload, correlated
from tailrace_protos.event import EpisodeSettled

COLUMNS = ("session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")
TAU_TOOL_S = 2.0  # median wait of a tool call; the trace has none


def load_trace(path: Path, scale: float = 1.0) -> Workload:
    """Read a workload; `scale` multiplies its tokens. Raises `ConfigError` for what it cannot read."""
    if path.is_dir() or path.suffix == ".jsonl":
        return _of_run(path, scale)
    if not path.is_file():
        raise ConfigError(
            f"--trace {path}: there is no such file; give a run's directory, a .csv or a .json file"
        )
    if path.suffix == ".csv":
        sessions = _sessions(path, scale)
        return _of_groups(path.stem, [[plan] for plan in sessions])
    if path.suffix != ".json":
        raise ConfigError(f"--trace {path}: must be a .csv file (replay format) or a .json file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "output_tokens_quantiles" in content:
            return _quantiles(path.stem, content, scale)
        if "episodes" in content:
            return _of_groups(path.stem, _tasks(content, scale))
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"--trace {path}: {error!r}; give a file in the form of benchmarks/scheduling/traces"
        ) from None
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


def _sessions(path: Path, scale: float) -> list[EpisodePlan]:
    rounds: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [one for one in COLUMNS if one not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"--trace {path}: lacks the columns {', '.join(missing)}")
        for line, row in enumerate(reader, start=2):
            try:
                [int(row[one]) for one in COLUMNS[1:5]], float(row["tool_wait_after_ms"])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--trace {path}, line {line}: {error}; give numbers") from None
            rounds[row["session_id"]].append(row)
    if not rounds:
        raise ConfigError(f"--trace {path}: holds no round; give at least one")
    return [_plan(rows, scale) for rows in rounds.values()]


def _plan(rows: list[dict[str, str]], scale: float) -> EpisodePlan:
    rows.sort(key=lambda row: int(row["round_idx"]))
    turns = [
        TurnPlan(
            max(int(scale * (int(row["input_len"]) + (int(row["prefix_len"]) if not turn else 0))), 1),
            max(int(scale * int(row["output_len"])), 1),
            float(row["tool_wait_after_ms"]) / 1000,
        )
        for turn, row in enumerate(rows)
    ]
    return (*turns[:-1], turns[-1]._replace(tool_s=0.0))


def _tasks(
    content: dict[str, list[dict[str, list[list[int]]]]], scale: float
) -> list[list[EpisodePlan]]:
    tasks: dict[int, list[EpisodePlan]] = defaultdict(list)
    for episode in content["episodes"]:
        turns = [
            TurnPlan(max(int(scale * new), 1), max(int(scale * out), 1), float(tool))
            for new, out, tool in episode["turns"]
        ]
        turns[-1] = turns[-1]._replace(tool_s=0.0)
        tasks[int(episode["task"])].append(tuple(turns))  # type: ignore[call-overload]
    return list(tasks.values())


def _of_groups(name: str, groups: list[list[EpisodePlan]]) -> Workload:
    """Draw a recorded group and its members with replacement; waits of 1 s stand for a tool call."""
    plans = [plan for group in groups for plan in group]
    longest = max(sum(one.input_tokens + one.output_tokens for one in plan) for plan in plans)

    def draw(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
        group = groups[int(rng.integers(len(groups)))]
        return [_with_waits(rng, group[int(rng.integers(len(group)))]) for _ in range(members)]

    return Workload(name, longest, draw)


def _with_waits(rng: np.random.Generator, plan: EpisodePlan) -> EpisodePlan:
    return tuple(
        turn._replace(tool_s=TAU_TOOL_S * math.exp(1.2 * rng.standard_normal()))
        if turn.tool_s == 1.0
        else turn
        for turn in plan
    )


def _quantiles(name: str, content: dict[str, list[int]], scale: float) -> Workload:
    lengths = np.maximum(scale * np.array(content["output_tokens_quantiles"]), 1)
    prompt = max(int(scale * np.median(content.get("input_tokens_quantiles", [512]))), 1)

    def draw(rng: np.random.Generator, members: int) -> list[EpisodePlan]:
        ranks = [NORMAL.cdf(one) * (len(lengths) - 1) for one in correlated(rng, members)]
        return [(TurnPlan(prompt, int(lengths[round(rank)]), 0.0),) for rank in ranks]

    return Workload(name, int(lengths[-1]) + prompt, draw)
