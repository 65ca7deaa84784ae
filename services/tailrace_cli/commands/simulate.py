"""`tailrace simulate`: a run on simulated engines, scheduled by the code that schedules real ones."""

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
from tailrace_cli.simulation.calibration import COSTS, fit, read_reports
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


WorkloadName = Annotated[
    Literal["logn", "pareto", "agent"],
    typer.Option(help="One turn of lognormal or Pareto length, or many turns with tools."),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Workload: directory of a run, replay CSV, groups or quantiles in JSON."),
]
TraceScale = Annotated[float, typer.Option(help="Multiplies the tokens of the trace.", min=0)]
Servers = Annotated[str, typer.Option(help="Inference servers; several: 8,64,512.")]
Episodes = Annotated[int, typer.Option(help="Episodes per server and optimizer step.", min=1)]
GroupsPerStep = Annotated[
    int, typer.Option(help="Groups of a step on every size of cluster; 0: by --episodes.", min=0)
]
GroupSize = Annotated[int, typer.Option(help="Episodes of a group.", min=1)]
MaxStaleness = Annotated[int, typer.Option(help="As in an experiment.", min=0)]
MinValid = Annotated[int, typer.Option(help="Members that a group needs to close early.", min=1)]
Policy = Annotated[
    Literal["mask", "drop", "wait", "close", "auto"], typer.Option(help="Of old groups.")
]
Rho = Annotated[float, typer.Option(help="Learner time against engine time of a group.", min=0)]
LearnerTokensPerS = Annotated[
    float, typer.Option(help="Context tokens that the learner trains a second; 0: by --rho.", min=0)
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
Slow = Annotated[float, typer.Option(help="Slowness of server 0, for example 5.")]
Fails = Annotated[bool, typer.Option("--fails", help="Server 0 fails every call.")]
WarmupSteps = Annotated[int, typer.Option(help="Steps before the measurement.", min=0)]
Steps = Annotated[int, typer.Option(help="Measured steps.", min=1)]
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
        engine=_engine(chosen, _costs(engine) | {key: size for key, size in sizes.items() if size}),
        recomputes=kv_on_update == "recompute",
        faults=_faults(slow, fails),
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
        world = World(replace(every, servers=count, groups_per_step=groups), chosen)
        rows.append({"servers": count} | _measures(world))
        timelines.append(world.timeline)
    stdout.print(f"{chosen.name}, policy {policy}, seed {seed}", soft_wrap=True)
    stdout.print(_table(rows))
    if to is not None:
        _write(rows, timelines, to)


def _write(rows: list[dict[str, Any]], timelines: list[Timeline], to: Path) -> None:
    from tailrace_cli.simulation.pictures import draw  # matplotlib takes a second

    (to / "result.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    draw(rows, timelines, to)


def _faults(slow: float, fails: bool) -> tuple[Fault, ...]:
    if not slow > 0:
        raise ConfigError(f"--slow {slow:g}: must be above 0; 5 makes server 0 five times slower")
    return (Fault(0, slow, fails),) if slow != 1.0 or fails else ()


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


def _counts(servers: str) -> list[int]:
    parts = [one.strip() for one in servers.split(",")]
    if not all(one.isdigit() and int(one) > 0 for one in parts):
        raise ConfigError(f"--servers {servers}: must be positive numbers with commas between, as 8,64")
    return [int(one) for one in parts]


def _costs(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    costs, sizes = (*COSTS, "restore_s"), ("kv_tokens", "max_running", "host_kv_tokens")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--engine {path}: {error}; give a JSON object of {', '.join((*costs, *sizes))}"
        ) from None
    given = content if isinstance(content, dict) else {"the whole": content}
    wrong = [
        key
        for key, value in given.items()
        if not isinstance(value, int | float) or not (value > 0 if key in costs else key in sizes)
    ]
    if wrong:
        raise ConfigError(
            f"--engine {path}: {', '.join(wrong)}: give positive numbers for "
            f"{', '.join((*costs, *sizes))} only"
        )
    return dict(content)


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
