"""From an experiment file and overrides to one validated, resolved experiment.

Hydra composes (defaults lists, groups, `key=value`); strict Structs decide what is valid. A key that
Hydra lets through and no Struct knows is an error naming the key, the file and the closest key.
"""

import math
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import (
    SECTIONS,
    Config,
    ConfigError,
    InvalidConfigError,
    RunConfig,
    run_config,
    section_config,
)
from tailrace.config.settings import apply_settings, set_at
from tailrace.config.yaml_text import checked_node, load_yaml
from tailrace.data import load_dataset
from tailrace.import_path import importable_from
from tailrace_agents.config import AgentsConfig
from tailrace_autoscaler.config import AutoscalerConfig
from tailrace_cli.config import ClusterConfig
from tailrace_cli.importing.systems import whole_file_hint, with_system
from tailrace_gateway.config import GatewayConfig
from tailrace_inference.config import InferenceConfig
from tailrace_learner.config import LearnerConfig
from tailrace_reward.config import RewardConfig
from tailrace_sandbox.config import SandboxConfig
from tailrace_scheduler.config import SchedulerConfig
from tailrace_weight_sync.config import WeightSyncConfig


@dataclass(frozen=True)
class Experiment:
    """Every section of one experiment, decoded, with the file it came from."""

    source: str
    run: RunConfig
    scheduler: SchedulerConfig
    agents: AgentsConfig
    gateway: GatewayConfig
    inference: InferenceConfig
    sandbox: SandboxConfig
    reward: RewardConfig
    learner: LearnerConfig
    autoscaler: AutoscalerConfig
    weight_sync: WeightSyncConfig
    cluster: ClusterConfig
    folder: Path | None = field(default=None, compare=False)  # may hold modules of the user
    given: frozenset[str] = field(default=frozenset(), compare=False)  # dotted keys, not defaults

    @property
    def evaluated_tags(self) -> tuple[str, ...]:
        """Environments and data sets that evaluations play, each once."""
        named = [args.tag or name for name, args in self.run.evaluations.items()]
        return tuple(dict.fromkeys(named or self.scheduler.eval_tags or self.scheduler.tags))

    def content(self) -> dict[str, Any]:
        """The resolved experiment as plain values, with every default; decoding them gives the same."""
        content: dict[str, Any] = msgspec.to_builtins(self.run)
        for section in SECTIONS:
            content[section] = msgspec.to_builtins(getattr(self, section))
        return content

    def to_yaml(self) -> str:
        """The same as text."""
        return yaml.safe_dump(self.content(), sort_keys=False, allow_unicode=True)


SECTION_KINDS: dict[str, type[Config]] = {
    name: kind
    for name, kind in get_type_hints(Experiment).items()
    if isinstance(kind, type) and issubclass(kind, Config)
}
"""The Struct of every section by name; `run` has the keys at the top level."""


def locate(experiment: str | None, config_path: str | None, config_name: str | None) -> Path:
    """The experiment file: a file, a folder with `experiment.yaml`, or `config_path`/`config_name`."""
    if config_path is not None or config_name is not None:
        path = Path(config_path or ".") / (config_name or "experiment")
    elif experiment is not None:
        path = Path(experiment)
    else:
        raise ConfigError("no experiment given: name a YAML file, or --config-path and --config-name")
    beside = path.parent / f"{path.name}.yaml"  # `.` has no name to replace
    candidates = (path, path / "experiment.yaml", beside)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    looked = ", ".join(map(str, candidates))
    raise ConfigError(f"no experiment file at {path}: looked for {looked}{_example_hint(path)}")


def _example_hint(path: Path) -> str:
    """Way to an example that a page names by its place in the repository; empty for other paths."""
    first, *steps = path.parts or ("",)
    if first != "examples" or not steps or Path(first).is_dir():
        return ""
    name = "/".join(steps[:-1] if path.suffix else steps)
    return f"; `tailrace init {name}` copies an example of the package"


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Compose, decode and cross-check the experiment at `path`; raises `ConfigError`."""
    try:
        return _loaded(path, overrides)
    except InvalidConfigError as error:
        if not (hint := _hint_at_system(path)):
            raise
        raise InvalidConfigError(error.source, [*error.problems, hint]) from error
    except ConfigError as error:
        if not (hint := _hint_at_system(path)):
            raise
        raise ConfigError(f"{error}; {hint}") from error


def _hint_at_system(path: Path) -> str:
    """Hint for a file of another system; empty for any other."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    return whole_file_hint(content, str(path)) if isinstance(content, dict) else ""


def _loaded(path: Path, overrides: Sequence[str]) -> Experiment:
    source = str(path) if not overrides else f"{path} with {' '.join(overrides)}"
    content = composed(path, overrides)
    section = content.get("cluster")
    limit_s = section.get("check_timeout_s") if isinstance(section, dict) else None
    with importable_from(path.parent), _time_limit(limit_s or ClusterConfig().check_timeout_s):
        return replace(decode(content, source), folder=path.parent)


def load_given(
    experiment: str | None,
    overrides: Sequence[str] | None,
    config_path: str | None,
    config_name: str | None,
) -> Experiment:
    """Load what a command line names; with `config_path` or `config_name` all words are overrides."""
    given = list(overrides or [])
    if (config_path or config_name) and experiment is not None:
        given.insert(0, experiment)
        experiment = None
    return load(locate(experiment, config_path, config_name), given)


@contextmanager
def _time_limit(limit_s: object) -> Iterator[None]:
    """Raises `TimeoutError` in the body after `limit_s`: modules of the user's algorithms may hang."""
    is_limited = isinstance(limit_s, int | float) and limit_s > 0
    if not is_limited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_number: int, _frame: object) -> None:
        raise TimeoutError(f"it took more than {limit_s} s (cluster.check_timeout_s)")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, float(str(limit_s)))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def decode(content: dict[str, Any], source: str) -> Experiment:
    """Strictly decodes every section of a composed experiment.

    Raises `InvalidConfigError` with the problems of all sections.
    """
    try:
        return _decoded(content, source)
    except InvalidConfigError as error:
        problems = [with_system(problem, content) for problem in error.problems]
        raise InvalidConfigError(source, problems) from error


def _decoded(content: dict[str, Any], source: str) -> Experiment:
    applied = apply_settings(content, source)
    decoded: dict[str, Any] = {}
    problems: list[str] = []
    for name, kind in SECTION_KINDS.items():
        try:
            if name == "run":
                decoded[name] = run_config(applied.content, source)
            else:
                decoded[name] = section_config(applied.content, name, kind, source)
        except InvalidConfigError as error:
            problems += map(applied.as_given, error.problems)
    if problems:
        raise InvalidConfigError(source, problems)
    return Experiment(source=source, given=frozenset(_keys_of(applied.content)), **decoded)


def with_values(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of dotted keys, checked as if they had been given."""
    content = experiment.content()
    for key, value in values.items():
        set_at(content, key, value)
    decoded = decode(content, experiment.source)
    return replace(decoded, folder=experiment.folder, given=experiment.given)


def _keys_of(content: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{section}{key}"
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{section}{key}.")


def count_gateways(experiment: Experiment) -> int:
    """Number of gateways that a local cluster starts."""
    wanted = experiment.cluster.num_gateways
    if wanted is None:
        return int(experiment.agents.workflow is not None or experiment.reward.asks_gateway)
    return wanted


def with_epochs(experiment: Experiment) -> Experiment:
    """The experiment with `max_steps` in place of `num_epochs`; loads the data sets to count their
    rows."""
    run = experiment.run
    if not run.num_epochs:
        return experiment
    num_rows = {}
    with importable_from(experiment.folder or Path.cwd()):
        for tag in experiment.scheduler.tags:
            if entry := experiment.agents.datasets.get(tag):
                place = f"{experiment.source}: agents.datasets.{tag}"
                num_rows[tag] = len(load_dataset(entry, run.seed, place))
    max_steps = steps_of_epochs(experiment, num_rows)
    return replace(experiment, run=msgspec.structs.replace(run, max_steps=max_steps, num_epochs=0))


def steps_of_epochs(experiment: Experiment, num_rows: Mapping[str, int]) -> int:
    """Whole steps of all epochs over data sets with `num_rows` by tag; `ConfigError` for none."""
    run, config = experiment.run, experiment.scheduler
    shares = dict(zip(config.tags, config.num_groups_partition or (1,) * len(config.tags), strict=True))
    # A cycle has `share` groups of each tag.
    num_cycles = max((math.ceil(rows / shares[tag]) for tag, rows in num_rows.items()), default=0)
    num_groups = run.num_epochs * num_cycles * sum(shares.values())
    if num_groups >= run.groups_per_step:
        return num_groups // run.groups_per_step
    few = f"{num_groups} groups are fewer than groups_per_step ({run.groups_per_step})"
    reason = few if num_cycles else "scheduler.tags names no data set, and only these have epochs"
    raise ConfigError(f"{experiment.source}: num_epochs: {reason}: set max_steps instead")


def compose_file(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Composes a file with the `defaults:` in its place and `overrides`; raises `ConfigError`."""
    try:
        if path.is_file():
            checked_node(path.read_text(encoding="utf-8", errors="replace"))
        with initialize_config_dir(config_dir=str(path.absolute().parent), version_base="1.3"):
            return compose(path.stem, list(overrides))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: it, or a file of its defaults, is no text in UTF-8: save it as UTF-8"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        told = str(error).partition("Config search path")[0]  # folders of ours follow
        raise ConfigError(f"{path}: {' '.join(told.split())}") from error


def composed(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Content of the file with `overrides`, as it is given, without defaults; raises `ConfigError`."""
    found = compose_file(path, [_forced(override, path.parent) for override in overrides])
    try:
        content = OmegaConf.to_container(found, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path} is empty: an experiment needs at least exp_name")
    return {str(key): value for key, value in content.items()}


def _forced(given: str, folder: Path) -> str:
    """Let `key=value` also set keys that the file leaves at their defaults.

    Hydra alone accepts only keys that the file spells out; whether a key exists is for the Structs
    to say. Choices of a config group (a folder beside the file) and removals stay as they are.
    """
    override = _parsed(given)
    if given[:1] in "+~":
        return given
    if not (folder / given.partition("=")[0].partition("@")[0]).is_dir():
        return f"++{given}"
    if not isinstance(override.value(), str | list):
        raise ConfigError(
            f"override {given!r}: {override.key_or_group} is a folder of files to choose from: give "
            "the name of one"
        )
    return given


def _parsed(given: str) -> Override:
    """One override, read by Hydra's grammar; raises `ConfigError`."""
    key, equals, value = given.partition("=")
    if not key or not (equals or given.startswith("~")):
        raise ConfigError(f"override {given!r} is not of the form key=value")
    try:
        override = OverridesParser.create().parse_override(given)
    except HydraException as error:
        quoted = shlex.quote(f'{key}="{value}"')
        inside = "inside the brackets (a key with such characters belongs into the file)"
        how = inside if value[:1] in ("[", "{") else f"of its own: {quoted}"
        raise ConfigError(
            f"override {given!r} cannot be read: values are written as in YAML; a text with special "
            f"characters needs quotes {how}"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"override {given!r} has several values, which only `tailrace train` takes: give one, or a "
            f"list: {shlex.quote(f'{key}=[{value}]')}"
        )
    return override
