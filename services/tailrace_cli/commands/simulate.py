"""`tailrace simulate`: a run on simulated engines, scheduled by the code that schedules real ones."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import replace
from rich.table import Table

from tailrace.config import ConfigError
from tailrace_cli.commands.options import OutputDir
from tailrace_cli.console import stdout
from tailrace_cli.event_log import log_of
from tailrace_cli.simulation.calibration import COSTS, fit, read_costs, read_reports
from tailrace_cli.simulation.patience import StuckRunError
from tailrace_cli.simulation.records import Fault, SimSettings, Timeline
from tailrace_cli.simulation.traces import load_trace
from tailrace_cli.simulation.workload import BUILT_IN, Workload
from tailrace_cli.simulation.world import World
from tailrace_scheduler.core.streams.settings import EngineModel

_SHOWN = {
    "servers": "servers",
    "efficiency": "efficiency",
    "attainment": "attainment",
    "masked": "masked",
    "thrown": "thrown",
    "length_bias": "length bias",
    "group_p50_s": "group p50 s",
    "group_p99_s": "group p99 s",
    "reprefill": "re-prefill",
    "preemptions": "preemptions",
    "learner_idle": "learner idle",
    "seconds_per_step": "s a step",
    "trained_tokens_per_s": "tokens/s",
}
_PERCENT = {
    "efficiency", "attainment", "masked", "thrown", "length_bias", "reprefill", "learner_idle",
}  # fmt: skip


_MAX_NUMBER = 1_000_000
_MAX_SERVERS = 65_536
_MAX_ADMITTED = 8_000_000  # episodes; about 1 kB each

WorkloadName = Annotated[
    Literal["logn", "pareto", "agent"],
    typer.Option(help="One turn of lognormal or Pareto length, or many turns with tools."),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Workload: directory of a run, rounds or requests, groups or quantiles."),
]


def _no_nan(value: float) -> float:
    """Refuses NaN, which passes the bounds of older versions of Typer."""
    if value != value:
        raise typer.BadParameter("nan is no number")
    return value


def _tokens_per_s(value: float) -> float:
    """Refuses rates that are so small that a step never ends."""
    if 0 < value < 1:
        raise typer.BadParameter(f"{value:g}: give 1 or more; 0: by --rho")
    return _no_nan(value)


TraceScale = Annotated[
    float,
    typer.Option(help="Multiplies the tokens of the trace.", min=0, max=1e6, callback=_no_nan),
]
Servers = Annotated[str, typer.Option(help="Inference servers; several: 8,64,512.")]
Episodes = Annotated[
    int, typer.Option(help="Episodes per server and optimizer step.", min=1, max=_MAX_NUMBER)
]
GroupsPerStep = Annotated[
    int,
    typer.Option(
        help="Groups of a step on every size of cluster; 0: by --episodes.", min=0, max=_MAX_NUMBER
    ),
]
GroupSize = Annotated[int, typer.Option(help="Episodes of a group.", min=1, max=_MAX_NUMBER)]
MaxStaleness = Annotated[int, typer.Option(help="As in an experiment.", min=0, max=_MAX_NUMBER)]
MinValid = Annotated[int, typer.Option(help="Members that a group needs to close early.", min=1)]
Policy = Annotated[
    Literal["mask", "drop", "wait", "close", "auto"], typer.Option(help="Of old groups.")
]
Rho = Annotated[
    float,
    typer.Option(
        help="Learner time against engine time of a group.", min=0, max=1000, callback=_no_nan
    ),
]
LearnerTokensPerS = Annotated[
    float,
    typer.Option(
        help="Context tokens that the learner trains a second, 1 or more; 0: by --rho.",
        min=0,
        max=1e12,
        callback=_tokens_per_s,
    ),
]
KvTokens = Annotated[
    int, typer.Option(help="KV capacity of a server; 0: of --engine, or 500,000.", min=0)
]
MaxRunning = Annotated[
    int, typer.Option(help="Requests that a server decodes at once; 0: of --engine, or 256.", min=0)
]
HostKvTokens = Annotated[
    int, typer.Option(help="KV kept in host memory; 0: of --engine, or none.", min=0)
]
EngineCosts = Annotated[
    Path | None, typer.Option(help="Costs and sizes as JSON; `simulate calibrate` writes them.")
]
KvOnUpdate = Annotated[
    Literal["keep", "recompute"],
    typer.Option(help="KV of running requests when a version comes; a run's default is recompute."),
]
Slow = Annotated[
    float,
    typer.Option(help="Slowness of server 0, for example 5.", min=1e-3, max=1e6, callback=_no_nan),
]
Fails = Annotated[bool, typer.Option("--fails", help="Server 0 fails every call.")]
WarmupSteps = Annotated[int, typer.Option(help="Steps before the measurement.", min=0, max=_MAX_NUMBER)]
Steps = Annotated[int, typer.Option(help="Measured steps.", min=1, max=_MAX_NUMBER)]
Seed = Annotated[int, typer.Option(help="Of the workload.", min=0)]
To = Annotated[Path | None, typer.Option(help="Folder for result.json and pictures.")]


app = typer.Typer()


@app.command()
def calibrate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File for --engine.")],
    output_dir: OutputDir = "runs",
) -> None:
    """Fit the costs of a run's engines to the reports that they made, for `simulate --engine`."""
    found = fit(read_reports(log_of(run, output_dir).parent / "engines.jsonl"))
    try:
        output.write_text(json.dumps(found.costs, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}; give a file that can be written"
        ) from None
    for name, value in found.costs.items():
        stdout.print(f"{name:14} {value:.3g} s" if name in COSTS else f"{name:14} {value:,}")
    stdout.print(
        f"fitted to {found.num_intervals} intervals; half of them are within "
        f"{100 * found.median_error:.1f}% of the measured time"
    )


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    workload: WorkloadName = "agent",
    trace: Trace = None,
    trace_scale: TraceScale = 1.0,
    servers: Servers = "8",
    episodes: Episodes = 64,
    groups_per_step: GroupsPerStep = 0,
    group_size: GroupSize = 16,
    max_staleness: MaxStaleness = 4,
    min_valid: MinValid = 8,
    policy: Policy = "auto",
    rho: Rho = 0.9,
    learner_tokens_per_s: LearnerTokensPerS = 0.0,
    kv_tokens: KvTokens = 0,
    max_running: MaxRunning = 0,
    host_kv_tokens: HostKvTokens = 0,
    engine: EngineCosts = None,
    kv_on_update: KvOnUpdate = "keep",
    slow: Slow = 1.0,
    fails: Fails = False,
    warmup_steps: WarmupSteps = 4,
    steps: Steps = 10,
    seed: Seed = 1,
    to: To = None,
) -> None:
    """Simulate training on clusters of these sizes and print the measures of each."""
    if context.invoked_subcommand:
        return
    chosen = load_trace(trace, trace_scale) if trace else BUILT_IN[workload]
    sizes = {"kv_tokens": kv_tokens, "max_running": max_running, "host_kv_tokens": host_kv_tokens}
    every = SimSettings(
        group_size=group_size,
        max_staleness=max_staleness,
        min_valid=min(min_valid, group_size),
        policy=policy,
        rho=rho,
        learner_tokens_per_s=learner_tokens_per_s,
        engine=_engine(chosen, read_costs(engine) | {key: size for key, size in sizes.items() if size}),
        recomputes=kv_on_update == "recompute",
        faults=(Fault(0, slow, fails),) if slow != 1.0 or fails else (),
        warmup_steps=warmup_steps,
        steps=steps,
        seed=seed,
    )
    if to is not None:
        _make_folder(to)
    rows: list[dict[str, Any]] = []
    timelines: list[Timeline] = []
    for count in _counts(servers):
        groups = groups_per_step or _groups(episodes, count, group_size)
        _check_size(groups * group_size, max_staleness)
        world = World(replace(every, servers=count, groups_per_step=groups), chosen)
        rows.append({"servers": count} | _measures(world))
        timelines.append(world.timeline)
    stdout.print(f"{chosen.name}, policy {policy}, seed {seed}", soft_wrap=True)
    stdout.print(_table(rows))
    if to is not None:
        _write(rows, timelines, to)


def _write(rows: list[dict[str, Any]], timelines: list[Timeline], to: Path) -> None:
    pictures: Any = importlib.import_module("tailrace_cli.simulation.pictures")  # matplotlib: a second
    (to / "result.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    pictures.draw(rows, timelines, to)


def _make_folder(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {to}: {error.strerror}; give a folder that can be written") from None


def _measures(world: World) -> dict[str, Any]:
    try:
        return world.run()
    except StuckRunError as error:
        raise ConfigError(
            f"the run was given up: {error}; simulate more --servers, and at least one that works"
        ) from None


def _engine(workload: Workload, values: dict[str, Any]) -> EngineModel:
    model = EngineModel(**values)
    if workload.context_limit > model.kv_tokens:
        raise ConfigError(
            f"--kv-tokens {model.kv_tokens}: the longest episode of {workload.name} has "
            f"{workload.context_limit} tokens; set it to at least that"
        )
    return model


def _groups(episodes: int, servers: int, group_size: int) -> int:
    """Return the groups of a step that give each server this number of episodes."""
    groups = round(episodes * servers / group_size)
    if groups < 1:
        raise ConfigError(f"--episodes {episodes}: gives no group of {group_size} a step; raise it")
    return groups


def _check_size(num_episodes: int, max_staleness: int) -> None:
    """Refuse runs that no memory holds: all admitted episodes are in it."""
    num_admitted = num_episodes * (max_staleness + 1)
    if num_admitted > _MAX_ADMITTED:
        raise ConfigError(
            f"up to {num_admitted:,} episodes are admitted at once, {_MAX_ADMITTED:,} at most: "
            "lower --servers, --episodes, --groups-per-step, --group-size or --max-staleness"
        )


def _counts(servers: str) -> list[int]:
    try:
        counts = [int(one) for one in servers.split(",")]
    except ValueError:
        counts = []
    if min(counts, default=0) < 1:
        raise ConfigError(f"--servers {servers}: must be positive numbers with commas between, as 8,64")
    if max(counts) > _MAX_SERVERS:
        raise ConfigError(f"--servers {max(counts)}: simulate at most {_MAX_SERVERS:,}")
    return counts


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    for _ in rows:
        table.add_column(justify="right")
    for key, name in _SHOWN.items():
        table.add_row(name, *(_cell(key, row[key]) for row in rows))
    return table


def _cell(key: str, value: float) -> str:
    return f"{100 * value:.1f}%" if key in _PERCENT else f"{value:,.0f}"
