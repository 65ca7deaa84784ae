"""What the services of a run must agree on: the keys at the top of an experiment file."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tailrace.config.base import Config, ConfigError
from tailrace.config.chat import ChatArgs
from tailrace_protos.session import ExportStyle
from tailrace_protos.subjects import check_run_name

# `~` in them is expanded here, once for all services.
_PATHS = ("output_dir", "pretrain", "resume_from_checkpoint", "render_save_dir", "logging_dir")


class RunConfig(Config, frozen=True, kw_only=True):
    """The keys at the top of an experiment file: what more than one service must agree on."""

    exp_name: str
    """Name of the run: its folder under `output_dir` and the prefix of its subjects and keys."""

    seed: int = 0
    """Fixes data order, initial weights and sampling seeds."""

    output_dir: str = "runs"
    """Where run directories are made: `<output_dir>/<exp_name>/`."""

    max_steps: int = 100
    """Optimizer steps until the run ends; 0 only evaluates."""

    save_steps: int = 50
    """A checkpoint every so many steps, and always one at the end."""

    eval_steps: int = 25
    """An evaluation every so many steps, besides those before the first and after the last step;
    0 means only these two."""

    logging_steps: int = 1
    """A progress line in the learner's log every so many steps."""

    pretrain: str = ""
    """Directory (or hub name) of a Hugging Face causal LM to start from. Empty: random weights from
    `learner.from_scratch`."""

    resume_from_checkpoint: bool | str = False
    """true: continue from the newest checkpoint of this run; a path: from that checkpoint."""

    render_save_dir: str = ""
    """Where rendered episodes of the last evaluation go; empty: `renders/` in the run directory."""

    logging_dir: str = ""
    """Where the services' logs go: `<logging_dir>/<exp_name>/<service>.log`; empty: `logs/` in the run
    directory."""

    group_size: int = 8
    """Episodes of one task whose returns are compared with each other."""

    groups_per_step: int = 32
    """Groups that make one optimizer step."""

    granularity: Literal["trajectory", "step"] = "trajectory"
    """What is a row to train. `trajectory`: an episode with all its turns (where a conversation forks,
    its branches are rows). `step`: every turn, with what the policy saw before it as context; the rows
    of an episode are one line of turns. For environments, agent loops and workflows alike."""

    max_staleness: int = 2
    """Optimizer steps that a trained token's policy may lie behind the learner. 0: synchronous."""

    chat: ChatArgs = ChatArgs()
    """How conversations are rendered and replies read."""

    def __post_init__(self) -> None:
        check_run_name(self.exp_name)
        for key in _PATHS:
            value = getattr(self, key)
            if isinstance(value, str) and value.startswith("~"):
                msgspec.structs.force_setattr(self, key, os.path.expanduser(value))
        for key in ("group_size", "groups_per_step", "logging_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("max_steps", "save_steps", "eval_steps", "max_staleness"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")

    @property
    def export_style(self) -> ExportStyle:
        """How the model calls of a loop, a workflow or a session become rows, unless they say it."""
        return ExportStyle.STEP if self.granularity == "step" else ExportStyle.CONCAT

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute."""
        return Path(self.output_dir).absolute() / self.exp_name

    @property
    def logs_dir(self) -> Path:
        """The folder of the services' logs, absolute."""
        if not self.logging_dir:
            return self.run_dir / "logs"
        return Path(self.logging_dir).absolute() / self.exp_name


class Endpoints(Config, frozen=True, kw_only=True):
    """Where the servers are and who we are to them; comes from the environment, never from YAML."""

    nats_url: str
    nats_user: str = ""
    nats_password: str = ""
    redis_url: str
    host_id: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Endpoints:
        """Read `TAILRACE_NATS_URL`, `_NATS_USER`, `_NATS_PASSWORD`, `_REDIS_URL`, `_HOST_ID`."""
        missing = [key for key in ("TAILRACE_NATS_URL", "TAILRACE_REDIS_URL") if key not in env]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: services are started by `tailrace up` or "
                "`tailrace train`, or by the chart, which set them"
            )
        return cls(
            nats_url=env["TAILRACE_NATS_URL"],
            nats_user=env.get("TAILRACE_NATS_USER", ""),
            nats_password=env.get("TAILRACE_NATS_PASSWORD", ""),
            redis_url=env["TAILRACE_REDIS_URL"],
            host_id=env.get("TAILRACE_HOST_ID", "") or this_host_id(),
        )


def this_host_id() -> str:
    """Equal for two processes only if they can share memory: host name and boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip()[:8] if boot_id.exists() else "noboot"
    return f"{socket.gethostname()}-{boot}"
