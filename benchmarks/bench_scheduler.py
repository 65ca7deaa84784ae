"""Scheduling policies compared in simulation: `make bench-scheduler`, `GOALS=1` or `FULL=1` for more.

Every policy runs in the same simulated cluster, driven by the scheduler's own core. Ours has one
configuration for the whole table. Finished runs are kept in `runs/bench_scheduler` by a hash of the
code, so a benchmark that was stopped goes on where it was; `--finished` writes the ones that there are.
Writes `benchmarks/results/scheduler.json` and `docs/scheduling.md`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import Results
from benchmarks.scheduling.cells import OURS, Side, play
from benchmarks.scheduling.cells import SchedulingCell as Cell
from benchmarks.scheduling.grid import GOALS, Job, at_goals, full, name_of, short
from benchmarks.scheduling.page import write_page
from tailrace_cli.simulation.patience import StuckRunError
from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.settings import StreamSettings

MEASURES = (
    "efficiency",
    "attainment",
    "masked",
    "thrown",
    "length_bias",
    "reprefill",
    "learner_idle",
    "preemptions",
    "lost_groups",
    "group_p50_s",
    "group_p99_s",
    "seconds_per_step",
)
LARGE = Cell("agent", 256, 4)
ROOT = Path(__file__).parents[1]
SIMULATED_BY = (
    "services/tailrace_scheduler/core/streams",
    "services/tailrace_scheduler/core/health.py",
    "services/tailrace_cli/simulation",
    "benchmarks/scheduling/policies",
    "benchmarks/scheduling/traces",
    "benchmarks/scheduling/cells.py",
)


class Played(NamedTuple):
    """A run: all measures are 0 where it was given up, for the reason that `gave_up` tells."""

    measures: dict[str, float]
    gave_up: str = ""


Rows = dict[tuple[Cell, Side], dict[int, Played]]  # by seed


def code_hash() -> str:
    """Return a hash of everything that decides what a simulated run gives."""
    digest = hashlib.sha256()
    for name in SIMULATED_BY:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".json", ".csv"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def played(job: Job) -> Played:
    """Simulate one run."""
    try:
        measures = play(*job)
    except StuckRunError as error:
        return Played(dict.fromkeys(MEASURES, 0.0), str(error))
    return Played({name: float(measures[name]) for name in MEASURES})


def _play(job: Job) -> tuple[Job, Played, float]:
    gc.disable()  # a run keeps nearly all that it makes; collected between two runs
    begin = time.process_time()
    made = played(job)
    gc.collect()
    return job, made, time.process_time() - begin


def measure(jobs: list[Job], processes: int, done: Path) -> Rows:
    """Run the jobs that the file `done` lacks, and append them to it; returns the rows of all."""
    found = {key: row for key, row in _read(done)}
    missing = [job for job in jobs if _key(job) not in found]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them are in {done}", flush=True)
    with multiprocessing.get_context("spawn").Pool(processes) as pool, done.open("a") as file:
        for number, (job, made, took_s) in enumerate(pool.imap_unordered(_play, missing), start=1):
            found[_key(job)] = made
            line = {"key": _key(job), "gave_up": made.gave_up, "row": made.measures}
            print(json.dumps(line), file=file, flush=True)
            name = f"{name_of(job[0])}, {job[1].name} {job[1].rule}, seed {job[2]}"
            shown = made.gave_up or f"{made.measures['efficiency']:.3f}"
            shown = f"{shown} ({took_s:.1f} s)"
            print(f"{number}/{len(missing)} {name}: {shown}", flush=True)
    rows: Rows = defaultdict(dict)
    for job in jobs:
        rows[job[0], job[1]][job[2]] = found[_key(job)]
    return rows


def _key(job: Job) -> str:
    return json.dumps(job)


def _read(done: Path) -> Iterator[tuple[str, Played]]:
    lines = done.read_text(encoding="utf-8").splitlines() if done.exists() else []
    for line in lines:
        if line.endswith("}}"):  # the last one may be cut off
            content = json.loads(line)
            yield content["key"], Played(content["row"], content["gave_up"])


def _mean(rows: dict[int, Played], name: str) -> float:
    return statistics.mean(row.measures[name] for row in rows.values())


def judge(results: Results, rows: Rows) -> None:
    """Add the targets."""
    for cell, goal in GOALS:
        if (cell, OURS) in rows:
            value = _mean(rows[cell, OURS], "efficiency")
            results.at_least(f"efficiency, {name_of(cell)}", value, goal)
    if (LARGE, OURS) in rows:
        results.at_most(f"re-prefill, {name_of(LARGE)}", _mean(rows[LARGE, OURS], "reprefill"), 0.05)
    ours = {cell: of_seeds for (cell, side), of_seeds in rows.items() if side == OURS}
    if not ours:
        return
    bias, _, where = min((_mean(row, "length_bias"), name_of(cell), cell) for cell, row in ours.items())
    results.at_least(f"least length bias of ours ({name_of(where)})", bias, 0.95)
    waste, name = max(
        (_mean(row, "masked") + _mean(row, "thrown"), name_of(cell)) for cell, row in ours.items()
    )
    results.at_most(f"most masked and thrown of ours ({name})", waste, 0.05)
    ratio, name = min(ratios(rows), default=(1.0, ""))
    results.at_least(f"least efficiency of ours against the best baseline ({name})", ratio, 0.98)


def ratios(rows: Rows) -> Iterator[tuple[float, str]]:
    """Yield ours against each baseline of each cell, over the seeds that both played."""
    for (cell, side), others in rows.items():
        theirs, ours = _mean(others, "efficiency"), _ours_beside(rows, cell, others)
        if side != OURS and theirs > 0 and ours > 0:
            yield ours / theirs, name_of(cell)


def _ours_beside(rows: Rows, cell: Cell, others: dict[int, Played]) -> float:
    """Return the mean efficiency of ours over the seeds of a baseline, 0 where ours played not all."""
    ours = rows.get((cell, OURS), {})
    if not others.keys() <= ours.keys():
        return 0.0
    return statistics.mean(ours[seed].measures["efficiency"] for seed in others)


def decisions_per_s(num_servers: int = 512, num_waiting: int = 100_000) -> tuple[float, float]:
    """Return decisions a second on one core, and bytes for each waiting episode."""
    per_step = num_waiting // 16
    core = StreamCore(StreamSettings(max_staleness=1, groups_per_step=per_step))
    for number in range(num_servers):
        core.on(ev.ServerReport(f"s{number}", step_s=0.02, num_running=1, policy_version=0), 0.0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(per_step):
        core.on(ev.GroupOpened(f"g{number}", 16, "task", 512), 0.0)
    each = (tracemalloc.get_traced_memory()[0] - before) / num_waiting
    tracemalloc.stop()
    running = [one.episode_id for one in core.decide(0.0) if isinstance(one, de.StartEpisode)]
    count, turn = 0, 0
    begin = time.process_time()
    while count < 50_000:
        now_s = turn * 1e-3
        turn += 1
        core.on(ev.EpisodeEnded(running[turn], True, 1000 + turn % 3000), now_s)
        decided = core.decide(now_s)
        running += [one.episode_id for one in decided if isinstance(one, de.StartEpisode)]
        count += 1
    return count / (time.process_time() - begin), each


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every policy, e, S and 8 seeds")
    parser.add_argument("--goals", action="store_true", help="8 seeds in the cells of the goals")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="cells whose name begins so")
    parser.add_argument("--finished", action="store_true", help="play nothing, write what has finished")
    parser.add_argument("--rows", type=Path, default=ROOT / "runs" / "bench_scheduler")
    options = parser.parse_args()
    grid = full if options.full else at_goals if options.goals else short
    jobs = [one for one in grid() if _is_chosen(one, options.only)]
    options.rows.mkdir(parents=True, exist_ok=True)
    results = Results("scheduler", ("numpy", "msgspec"), grid=grid.__name__)
    rate, each = decisions_per_s()
    done = options.rows / f"{code_hash()}.jsonl"
    if options.finished:
        finished = {key for key, _ in _read(done)}
        jobs = [job for job in jobs if _key(job) in finished]
    rows = measure(jobs, options.processes, done)
    for (cell, side), of_seeds in sorted(rows.items(), key=lambda one: (name_of(one[0][0]), one[0][1])):
        means = {name: _mean(of_seeds, name) for name in MEASURES}
        given_up = next((one.gave_up for one in of_seeds.values() if one.gave_up), "")
        results.add(
            cell=name_of(cell),
            policy=side.name,
            rule=side.rule,
            seeds=len(of_seeds),
            ours=_ours_beside(rows, cell, of_seeds),
            **means,
            gave_up=given_up,
        )
    judge(results, rows)
    results.at_least("decisions a second on one core at 512 servers", rate, 20_000)
    results.at_most("bytes for each of 100,000 waiting episodes", each, 1_000)
    results.show()
    if not options.only:
        results.write()
        write_page(results)
    sys.exit(results.exit_code)


def _is_chosen(job: Job, only: str) -> bool:
    return name_of(job[0]).startswith(only)


if __name__ == "__main__":
    main()
