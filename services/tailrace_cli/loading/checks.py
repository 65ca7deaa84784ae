"""All checks of an experiment before it runs: its sections, what it names, its sizes.

Invariants: nothing that a user wrote is loaded in this process; a step that takes longer than
`cluster.check_timeout_s` or ends its process is a problem of that step, and the others go on.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from typing import IO, Any

import msgspec

from tailrace.config import ConfigError, InvalidConfigError
from tailrace.processes import WorkerProcess
from tailrace_agents.config import AgentsConfig
from tailrace_cli.cluster.plan import Site, check_gpus, service_environment
from tailrace_cli.cluster.servers import ServerAddresses, nats_server_binary, redis_server_binary
from tailrace_cli.experiment import Experiment, with_values
from tailrace_cli.loading import fitting
from tailrace_cli.loading.facts import Begin, Begun, Loaded, MachineFacts, ModelFacts, PromptFacts, Step
from tailrace_cli.loading.gpu_defaults import gpu_defaults
from tailrace_cli.validation import problems_of
from tailrace_learner.config import LearnerConfig

_PROCESS = "tailrace_cli.loading.process"
_START_TIMEOUT_S = 120.0  # of a process of ours, on a busy machine
_NUM_TAIL_BYTES = 2000
_PACKAGES = {"peft": "lora", "deepspeed": "deepspeed", "megatron": "megatron"}  # extra of each
_SECTIONS = {"loop": "agent_loops", "environment": "custom_envs", "dataset": "datasets"}


@dataclass(frozen=True)
class Report:
    """Result of all checks."""

    problems: tuple[str, ...]
    experiment: Experiment  # with the defaults of its devices
    defaults: Mapping[str, Any] = field(default_factory=dict)  # those that the devices chose
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # one for each tag, workflow, tool worker
    model: ModelFacts | None = None
    machine: MachineFacts | None = None
    prompts: tuple[PromptFacts, ...] = ()
    num_steps: int = 0
    took_s: float = field(default=0.0, compare=False)


def require_loadable(experiment: Experiment) -> Report:
    """Checks an experiment that is about to run; `InvalidConfigError` with all problems."""
    report = check(experiment)
    if report.problems:
        raise InvalidConfigError(experiment.source, report.problems)
    return report


def estimate(experiment: Experiment, machine: MachineFacts, model_config: str) -> Report:
    """Compares the sections, and the model's sizes with the devices of `machine`; loads nothing else.

    `model_config`: a config.json in place of the model's own.
    """
    started_s = time.monotonic()
    problems = problems_of(experiment)
    key = "pretrain" if experiment.learner.from_scratch is None else "learner.from_scratch"
    loaded = asyncio.run(_load(experiment, [Step("sizes", key, model_config)]))
    report = combined(experiment, problems, [*loaded, Loaded(machine=machine)])
    return replace(report, num_steps=1, took_s=time.monotonic() - started_s)


def check(
    experiment: Experiment,
    *,
    with_architecture: bool = False,
    on_machine: bool = True,
    machine: MachineFacts | None = None,
) -> Report:
    """Checks an experiment.

    `with_architecture` also builds the model on torch's meta device, which the learner of a run does
    first of all. `on_machine`: the run will be on this machine, so that its devices and memory count;
    `machine`: another one, whose devices count.
    """
    started_s = time.monotonic()
    problems = problems_of(experiment)
    every = steps_of(experiment, with_architecture=with_architecture, on_machine=on_machine)
    steps = [step for step in every if not _is_refused(step, problems)]
    if on_machine:
        problems += _absent_here(experiment)
    results = asyncio.run(_load(experiment, steps))
    results += [] if machine is None else [Loaded(machine=machine)]
    report = combined(experiment, problems, results)
    return replace(report, num_steps=len(steps), took_s=time.monotonic() - started_s)


def _is_refused(step: Step, problems: Iterable[str]) -> bool:
    """True if a comparison of the sections has found a problem at the step's place."""
    return any(problem.startswith((f"{step.key}:", f"{step.key}.")) for problem in problems)


def combined(experiment: Experiment, problems: Iterable[str], results: Sequence[Loaded]) -> Report:
    """Adds to `problems` those that were met while loading, and those of sizes that do not fit."""
    model = _model_of(results)
    machine = next((each.machine for each in results if each.machine), None)
    prompts = tuple(each.prompt for each in results if each.prompt)
    problems = [*problems]
    defaults = {} if problems else _defaults(experiment, model, machine)
    if defaults:
        experiment = with_values(experiment, defaults)
        problems += problems_of(experiment)
    fitted = _fitted(experiment, model, machine, prompts)
    found: list[Loaded | fitting.Findings] = [*results, *fitted]
    problems += chain.from_iterable(each.problems for each in found)
    return Report(
        problems=tuple(dict.fromkeys(problems)),
        experiment=experiment,
        defaults=defaults,
        notes=tuple(note for each in found for note in each.notes),
        lines=tuple(each.line for each in results if each.line),
        model=model,
        machine=machine,
        prompts=prompts,
    )


def _model_of(results: Sequence[Loaded]) -> ModelFacts | None:
    """The policy's sizes that were found last, with those of the models beside it."""
    found = next((each.model for each in reversed(results) if each.model), None)
    roles = dict(chain.from_iterable(each.role_sizes.items() for each in results))
    return found and msgspec.structs.replace(found, role_sizes=roles)


def _defaults(
    experiment: Experiment, model: ModelFacts | None, machine: MachineFacts | None
) -> Mapping[str, Any]:
    """Returns what the devices choose; nothing while the model or the machine is unknown."""
    if model is None or machine is None:
        return {}
    return gpu_defaults(experiment, model, machine.gpu_bytes)


def _fitted(
    experiment: Experiment,
    model: ModelFacts | None,
    machine: MachineFacts | None,
    prompts: tuple[PromptFacts, ...],
) -> Iterator[fitting.Findings]:
    yield fitting.check_lengths(experiment, model, prompts)
    yield fitting.check_groups(experiment, prompts)
    yield fitting.check_scored(experiment, prompts)
    yield fitting.check_held_out(experiment, prompts)
    yield fitting.check_temperatures(experiment)
    if machine is not None:
        yield fitting.check_devices(experiment, machine)
        if model is not None:
            yield fitting.check_memory(experiment, model, machine)


def steps_of(experiment: Experiment, *, with_architecture: bool, on_machine: bool) -> Iterator[Step]:
    """Everything to load, in the order of loading."""
    model_key = "pretrain" if experiment.learner.from_scratch is None else "learner.from_scratch"
    yield Step("model", model_key)
    if with_architecture:
        yield Step("architecture", model_key)
    if on_machine:
        yield Step("machine", "machine", "cuda" if _asks_for_gpus(experiment) else "")
    yield from _of_learner(experiment.learner)
    for index in range(len(experiment.cluster.tool_workers)):
        yield Step("tool", f"cluster.tool_workers[{index}]", str(index), True)
    yield from _of_agents(experiment.agents)
    for index, entry in enumerate(experiment.reward.components):
        if entry.kind != "env_return":
            yield Step("reward", f"reward.rewards[{index}]", str(index), True)


def _of_learner(learner: LearnerConfig) -> Iterator[Step]:
    if learner.warm_start is not None:
        yield Step("warm_start", "learner.warm_start")
    if learner.chosen_trackers:
        yield Step("trackers", "learner.trackers")
    for role in ("reference", "critic"):
        if name := getattr(getattr(learner, role), "pretrain", ""):
            yield Step("role", f"learner.{role}.pretrain", name)


def _of_agents(agents: AgentsConfig) -> Iterator[Step]:
    for kind, section in _SECTIONS.items():
        for name in getattr(agents, section):
            yield Step(kind, f"agents.{section}.{name}", name, True)
    if agents.workflow is not None:
        yield Step("workflow", "agents.workflow", "", True)


def _asks_for_gpus(experiment: Experiment) -> bool:
    cluster, inference = experiment.cluster, experiment.inference
    devices = (experiment.learner.device, inference.device, experiment.reward.model_args.device)
    named = (
        cluster.learner_gpus,
        cluster.inference_gpus,
        cluster.reward_gpus,
        cluster.num_gpus_per_node,
    )
    return "cuda" in devices or any(named) or bool(inference.gpu_memory_utilization)


def _absent_here(experiment: Experiment) -> Iterator[str]:
    """Programs and packages that the run needs and this machine lacks."""
    strategy = experiment.learner.strategy_args.resolved_name
    needed = {"learner.lora": "peft"} if experiment.learner.lora else {}
    if strategy in _PACKAGES:
        needed["learner.strategy_args.strategy_name"] = strategy
    for key, package in needed.items():
        if find_spec(package) is None:
            yield f"{key} needs {package}: pip install 'tailrace[{_PACKAGES[package]}]'"
    config = experiment.cluster
    for find in (nats_server_binary, redis_server_binary):
        try:
            find(config)
        except ConfigError as error:
            yield str(error)
    try:
        check_gpus(config, None)
    except ConfigError as error:
        yield str(error)


async def _load(experiment: Experiment, steps: Iterable[Step]) -> list[Loaded]:
    """Results of all steps in their order, from one process for each environment."""
    is_one = not experiment.cluster.keep_environment
    shares: dict[str, list[Step]] = {}
    for step in steps:
        service = "learner" if is_one or not step.runs_user_code else "agents"
        shares.setdefault(service, []).append(step)
    loaded = await asyncio.gather(
        *(_share(experiment, service, share) for service, share in shares.items())
    )
    return [one for each in loaded for one in each]


async def _share(experiment: Experiment, service: str, steps: list[Step]) -> list[Loaded]:
    with tempfile.TemporaryFile() as errors:
        child = _Child(experiment, service, errors)
        try:
            return [await child.load(step) for step in steps]
        finally:
            await child.end()


class _Child:
    """A loading process, replaced when a step kills it."""

    def __init__(self, experiment: Experiment, service: str, errors: IO[bytes]) -> None:
        self._experiment = experiment
        self._errors = errors
        self._timeout_s = experiment.cluster.check_timeout_s
        self._process: WorkerProcess | None = None
        run_dir = experiment.run.run_dir
        site = Site(
            config_path=run_dir / "config.yaml",
            state_dir=run_dir / "state",
            connection=ServerAddresses("", "", {}),
            num_threads=experiment.cluster.num_threads,
            user_modules=experiment.folder,
        )
        self._environment = service_environment(service, site, experiment.cluster)

    async def load(self, step: Step) -> Loaded:
        """Result of a step, whatever becomes of the process."""
        try:
            process = self._process or await self._start()
        except ConfigError as error:
            return Loaded(problems=(f"{step.key}: {error}",))
        try:
            async with asyncio.timeout(self._limit_s(step)):
                return await process.exchange(step, Loaded)
        except TimeoutError:
            await self.end()
            reason = (
                f"loading it took more than {self._timeout_s:g} s: move slow work out of the import "
                "and the constructor, or raise cluster.check_timeout_s"
            )
        except EOFError:
            reason = f"loading it {_end(await process.exit_code())}{self._last_line()}"
            self._process = None
        return Loaded(problems=(f"{step.key}: {reason}",))

    def _limit_s(self, step: Step) -> float:
        """Time limit of a step; those that import torch and nothing of the user's have more."""
        is_ours = step.kind in ("architecture", "machine")
        return max(self._timeout_s, _START_TIMEOUT_S) if is_ours else self._timeout_s

    async def end(self) -> None:
        """Kills the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _start(self) -> WorkerProcess:
        process = await WorkerProcess.start(
            _PROCESS, environment=self._environment, errors=self._errors
        )
        self._process = process
        begin = Begin(self._experiment.to_yaml(), self._experiment.source)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                error = (await process.exchange(begin, Begun)).error
        except (TimeoutError, EOFError):
            error = f"the process that loads it did not start{self._last_line()}"
        if error:
            await self.end()
            raise ConfigError(error.removeprefix(f"{self._experiment.source}: "))
        return process

    def _last_line(self) -> str:
        """Last line that the process printed, as an end of a sentence."""
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - _NUM_TAIL_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"; its last line was: {lines[-1].strip()}" if lines else ""


def _end(exit_code: int) -> str:
    if exit_code < 0:
        with suppress(ValueError):
            return f"ended its process (signal {signal.Signals(-exit_code).name})"
    return f"ended its process (exit code {exit_code})"
