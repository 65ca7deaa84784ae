"""From an experiment file and overrides to one validated, resolved experiment.

Hydra composes (defaults lists, groups, `key=value`); strict Structs decide what is valid. A key that
Hydra lets through and no Struct knows is an error naming the key, the file and the closest key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import SECTIONS, ConfigError, RunConfig, run_config, section_config
from tailrace.config.settings import apply_settings
from tailrace.import_path import importable_from
from tailrace_agents.config import AgentsConfig
from tailrace_cli.config import ClusterConfig
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
    weight_sync: WeightSyncConfig
    cluster: ClusterConfig
    folder: Path | None = field(default=None, compare=False)  # users' modules may lie in it

    def to_yaml(self) -> str:
        """The resolved experiment with every default written out; loading it gives the same."""
        content: dict[str, Any] = msgspec.to_builtins(self.run)
        for section in SECTIONS:
            content[section] = msgspec.to_builtins(getattr(self, section))
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def locate(experiment: str | None, config_path: str | None, config_name: str | None) -> Path:
    """The experiment file: a file, a folder with `experiment.yaml`, or `config_path`/`config_name`."""
    if config_path is not None or config_name is not None:
        path = Path(config_path or ".") / (config_name or "experiment")
    elif experiment is not None:
        path = Path(experiment)
    else:
        raise ConfigError("no experiment given: name a YAML file, or --config_path and --config_name")
    beside = path.parent / f"{path.name}.yaml"  # `.` has no name to replace
    candidates = (path, path / "experiment.yaml", beside)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    raise ConfigError(f"no experiment file at {path}: looked for {', '.join(map(str, candidates))}")


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Compose, decode and cross-check the experiment at `path`; raises `ConfigError`."""
    source = str(path) if not overrides else f"{path} with {' '.join(overrides)}"
    with importable_from(path.parent):
        return replace(decode(_compose(path, overrides), source), folder=path.parent)


def decode(content: dict[str, Any], source: str) -> Experiment:
    """Strictly decode every section of a composed experiment."""
    applied = apply_settings(content, source)
    try:
        return _decode(applied.content, source)
    except ConfigError as error:
        raise ConfigError(applied.as_given(str(error))) from error


def _decode(content: dict[str, Any], source: str) -> Experiment:
    return Experiment(
        source=source,
        run=run_config(content, source),
        scheduler=section_config(content, "scheduler", SchedulerConfig, source),
        agents=section_config(content, "agents", AgentsConfig, source),
        gateway=section_config(content, "gateway", GatewayConfig, source),
        inference=section_config(content, "inference", InferenceConfig, source),
        sandbox=section_config(content, "sandbox", SandboxConfig, source),
        reward=section_config(content, "reward", RewardConfig, source),
        learner=section_config(content, "learner", LearnerConfig, source),
        weight_sync=section_config(content, "weight_sync", WeightSyncConfig, source),
        cluster=section_config(content, "cluster", ClusterConfig, source),
    )


def count_gateways(experiment: Experiment) -> int:
    """How many gateways a local cluster starts."""
    wanted = experiment.cluster.num_gateways
    if wanted is None:
        return 1 if experiment.agents.workflow is not None else 0
    return wanted


def _compose(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
            composed = compose(path.stem, [_forced(override, path.parent) for override in overrides])
        content = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path} is empty: an experiment needs at least exp_name")
    return {str(key): value for key, value in content.items()}


def _forced(override: str, folder: Path) -> str:
    """Let `key=value` also set keys that the file leaves at their defaults.

    Hydra alone accepts only keys that the file spells out; whether a key exists is for the Structs
    to say. Choices of a config group (a folder beside the file) stay as they are.
    """
    key, equals, _ = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form key=value")
    if key[:1] in "+~" or (folder / key.split("@")[0]).is_dir():
        return override
    return f"++{override}"
