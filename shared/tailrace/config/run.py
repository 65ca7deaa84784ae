"""Keys at the top of an experiment file, which services share, and the endpoints of a run."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from tailrace.config.base import Config, ConfigError
from tailrace_protos.session import ExportStyle
from tailrace_protos.subjects import check_run_name

ReasoningPolicy = Literal["keep", "fork"]
StaleGroups = Literal["mask", "drop", "wait", "close", "auto"]


class ChatArgs(Config, frozen=True, kw_only=True):
    """The key `chat` of an experiment file."""

    tool_parser: str = "auto"
    """Format in which the model writes tool calls: `hermes`, `qwen3_coder`, `glm45`, `llama3_json`,
    `mistral`, `deepseek`, `gpt_oss` (needs harmony channels), `pythonic`, or your own `module:Class`.
    `auto`: the format in which the chat template renders a call. `none`: replies are not searched for
    calls."""

    reasoning_parser: str = "auto"
    """Format in which the model marks its thoughts: `think` (`<think>` tags), `harmony` (channels), or
    `module:Class` of your own. `auto`: harmony if the chat template has channels or the tool parser
    needs them, think if the template or the tokenizer has the tag `<think>`, else none. `none`: a whole
    reply is the answer."""

    reasoning: ReasoningPolicy = "keep"
    """Rule for thoughts of an earlier reply that a client or the template drops. keep: the model still
    sees the tokens that it sampled; fork: the conversation is rendered again without the thoughts."""

    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking: false`."""


_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TracingArgs(Config, frozen=True, kw_only=True):
    """The key `tracing` of an experiment file: spans of sampled episodes (`docs/observe.md`)."""

    endpoint: str = ""
    """URL of an OTLP receiver over HTTP, such as `http://localhost:4318`. Empty: the variable
    `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`; without these no spans are
    sent. Headers with a key are in `OTEL_EXPORTER_OTLP_HEADERS`. Needs the extra `otel`."""

    mlflow: str = ""
    """Tracking URI of MLflow, such as `sqlite:///mlflow.db` or `http://mlflow:5000` (3.6 or later, with
    a database). Every sampled episode becomes a trace of the experiment `exp_name`, with its messages,
    tool calls, token counts and rewards. Empty: none. Needs the extra `mlflow`."""

    mlflow_per_minute: int = 12
    """Most traces that one agents process writes to MLflow in a minute; further ones are left out and
    counted as dropped. MLflow takes 16 ms of a core for a short episode, more for a long one."""

    sample_rate: float = 0.01
    """Share of episodes that are traced, if there is a receiver: 0 for none, 1 for all."""

    messages: bool = False
    """Whether OTLP spans have the messages of episodes, and arguments and results of tools."""

    max_queued_spans: int = 4096
    """Spans that wait for a receiver in one process; further ones are dropped and counted."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ValueError("sample_rate must be from 0 to 1")
        if self.mlflow_per_minute < 1:
            raise ValueError("mlflow_per_minute must be at least 1")
        if self.max_queued_spans < 1:
            raise ValueError("max_queued_spans must be at least 1")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must begin with http:// or https://")

    @property
    def resolved_endpoint(self) -> str:
        """The URL of the receiver; empty: none."""
        given = map(os.environ.get, _OTLP_ENDPOINTS)
        return self.endpoint or next(filter(None, given), "")


# Paths in which `~` is expanded here, once for all services.
_PATHS = ("output_dir", "pretrain", "resume_from_checkpoint", "render_save_dir", "logging_dir")


MAX_EVAL_EPISODES = 1_000_000  # they are planned at once


class EvaluationArgs(Config, frozen=True, kw_only=True):
    """One named evaluation: tasks, samples of each, and their sampling."""

    tag: str = ""
    """Environment or data set: a name in `agents.custom_envs` or `agents.datasets`. Empty: the
    evaluation's own name."""

    num_tasks: int = 0
    """Tasks, from the start of the set; 0: `scheduler.eval_groups`. Between the first and the last
    evaluation at most `scheduler.eval_interim_groups`."""

    num_samples: int = 1
    """Episodes of each task. With several, `pass@k` is reported beside the means."""

    temperature: float | None = None
    """Temperature; null: that of `agents.eval_generating_args`. 0 is greedy."""

    top_p: float | None = None
    """Smallest probability mass to sample from; null: that of `agents.eval_generating_args`."""

    max_new_tokens: int | None = None
    """Tokens that an episode may sample; null: those of `agents.eval_generating_args`."""

    def __post_init__(self) -> None:
        if self.num_tasks < 0 or self.num_samples < 1:
            raise ValueError("num_tasks must not be negative, num_samples must be at least 1")
        if max(self.num_tasks, 1) * self.num_samples > MAX_EVAL_EPISODES:
            raise ValueError(f"num_tasks x num_samples must be at most {MAX_EVAL_EPISODES}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError("temperature must not be negative")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError("top_p must be above 0 and at most 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError("max_new_tokens must be at least 1")


class RunConfig(Config, frozen=True, kw_only=True):
    """Keys at the top of an experiment file, which more than one service reads."""

    exp_name: str
    """Name of the run: its folder under `output_dir` and the prefix of its subjects and keys."""

    seed: int = 0
    """Seed of data order, initial weights and sampling."""

    output_dir: str = "runs"
    """Folder of run directories: `<output_dir>/<exp_name>/`."""

    max_steps: int = 100
    """Optimizer steps of the run; with 0 it only evaluates. `num_epochs` replaces it."""

    num_epochs: int = 0
    """Epochs of the training data sets instead of `max_steps`, which `tailrace train` then computes
    from the number of rows. Every epoch visits each row once, in another order; a remainder of the last
    epoch that makes no whole step is left out. With several tags an epoch lasts until all data sets
    have been read. 0: `max_steps` counts."""

    save_steps: int = 50
    """Steps between two checkpoints; there is always one at the end, and with 0 only that one."""

    eval_steps: int = 25
    """Steps between two evaluations. Every run is also evaluated before the first and after the last
    step; with 0 only then."""

    evaluations: dict[str, EvaluationArgs] = msgspec.field(default_factory=dict)
    """Named evaluations, in place of `scheduler.eval_tags` and `scheduler.eval_group_size`: several
    sets, or one set sampled in several ways. Each has its own metrics (`eval/tag/<name>/...`); those of
    the first are also the run's `eval/success_rate` and `eval/reward_mean`."""

    logging_steps: int = 1
    """Steps between two progress lines in the learner's log."""

    pretrain: str = ""
    """Directory or hub name of the Hugging Face causal LM that training starts from. Empty: random
    weights from `learner.from_scratch`."""

    resume_from_checkpoint: bool | str = False
    """true: continue from the newest checkpoint of this run. A path: continue from that checkpoint."""

    render_save_dir: str = ""
    """Folder for pictures of the last evaluation's episodes; empty: `renders/` in the run directory."""

    logging_dir: str = ""
    """Folder of the services' logs, `<logging_dir>/<exp_name>/<service>.log`; empty: `logs/` in the run
    directory."""

    group_size: int = 8
    """Episodes of one task, whose returns are compared with each other."""

    groups_per_step: int = 32
    """Groups of one optimizer step."""

    granularity: Literal["trajectory", "step"] = "trajectory"
    """Unit of a training row. `trajectory`: an episode with all its turns; if a conversation forks,
    each branch is a row. `step`: each turn, with the context that the policy saw; the rows of an
    episode are its turn sequence. The same for environments, agent loops and workflows."""

    max_staleness: int = 2
    """Largest number of optimizer steps by which the policy of a trained token may be behind the
    learner. 0: synchronous. Tokens that are older are never trained."""

    stale_groups: StaleGroups = "auto"
    """Treatment of groups that are still open when their oldest tokens reach `max_staleness`.
    `mask`: the learner goes on with other groups; tokens that become too old are masked.
    `drop`: as `mask`, but a group with a token that is too old is given back whole, and another is
    admitted instead. `wait`: the step keeps places for such groups and waits for them.
    `close`: as `wait`, and when the learner has nothing else to train, they close with their finished
    episodes, if `scheduler.min_valid` of them are valid; the other episodes are aborted. A group with
    fewer valid ones waits a step longer, and its oldest tokens are masked. `auto`: as `close`, but the
    episodes with the longest expected rest are aborted first and the others go on. One is aborted only
    if the engine time saved outweighs its work, and at most `scheduler.max_waste` of all tokens are
    thrown away."""

    colocated: bool = False
    """Learner and inference servers have the same devices and take turns: servers sleep (calls are
    held) while the learner computes; its memory moves to the host while servers generate. Without it,
    a GPU that both have is an error at the start (`docs/gpu.md`)."""

    chat: ChatArgs = ChatArgs()
    """Rendering of conversations and parsing of replies."""

    tracing: TracingArgs = TracingArgs()
    """Traces of episodes through all services."""

    def __post_init__(self) -> None:
        check_run_name(self.exp_name)
        for key in _PATHS:
            value = getattr(self, key)
            if isinstance(value, str) and value.startswith("~"):
                msgspec.structs.force_setattr(self, key, os.path.expanduser(value))
        for key in ("group_size", "groups_per_step", "logging_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("max_steps", "num_epochs", "save_steps", "eval_steps", "max_staleness"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")

    def old_step(self, step: int) -> int:
        """Newest step whose tokens a learner at `step` is the last to train, so it keeps places for
        their groups; -1: none."""
        return step - self.max_staleness if self.stale_groups in ("wait", "close", "auto") else -1

    @property
    def export_style(self) -> ExportStyle:
        """Style in which model calls become rows, unless a loop, workflow or session sets its own."""
        return ExportStyle.STEP if self.granularity == "step" else ExportStyle.CONCAT

    @property
    def run_dir(self) -> Path:
        """Absolute path of the run directory."""
        return Path(self.output_dir).absolute() / self.exp_name

    @property
    def logs_dir(self) -> Path:
        """Absolute path of the folder of the services' logs."""
        if not self.logging_dir:
            return self.run_dir / "logs"
        return Path(self.logging_dir).absolute() / self.exp_name


_CREDENTIALS = re.compile(r"(^|//|,)[^/@,]*@")


class Endpoints(Config, frozen=True, kw_only=True):
    """Addresses of NATS and Redis, and our credentials, from environment variables, never from YAML."""

    nats_url: str
    nats_user: str = ""
    nats_password: str = ""
    redis_url: str  # with the credentials
    host_id: str
    ca_file: str = ""  # certificates that vouch for NATS and Redis; empty: the system's

    @property
    def shown_nats_url(self) -> str:
        """URL of NATS for logs and messages: without the credentials that it may hold."""
        return _CREDENTIALS.sub(r"\1", self.nats_url)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Endpoints":
        """Reads `TAILRACE_NATS_URL`, `_NATS_USER`, `_REDIS_URL`, `_REDIS_USER`, `_HOST_ID`, `_CA_FILE`.

        Passwords are `_NATS_PASSWORD` and `_REDIS_PASSWORD`, or in the files that `_NATS_PASSWORD_FILE`
        and `_REDIS_PASSWORD_FILE` name. Redis's may also be part of its URL.
        """
        missing = [key for key in ("TAILRACE_NATS_URL", "TAILRACE_REDIS_URL") if key not in env]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: start services with `tailrace up` or `tailrace "
                "train`, or by the chart, which set them"
            )
        if ":" in (host := env.get("TAILRACE_ADVERTISE_HOST", "")):
            raise ConfigError(
                f"TAILRACE_ADVERTISE_HOST is {host}: services listen on IPv4, so name a host or an "
                "IPv4 address; on Kubernetes a pod's first address must be one (status.podIP)"
            )
        ca_file = env.get("TAILRACE_CA_FILE", "")
        return cls(
            nats_url=env["TAILRACE_NATS_URL"],
            nats_user=env.get("TAILRACE_NATS_USER", ""),
            nats_password=secret_variable(env, "TAILRACE_NATS_PASSWORD"),
            redis_url=_redis_url(env, ca_file),
            host_id=env.get("TAILRACE_HOST_ID", "") or this_host_id(),
            ca_file=ca_file,
        )


def secret_variable(env: Mapping[str, str], name: str) -> str:
    """Reads a secret from a variable, or from the file that `<name>_FILE` names."""
    path = env.get(f"{name}_FILE", "")
    if not path:
        return env.get(name, "")
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name}_FILE: cannot read {path}: {error.strerror}") from error


def _redis_url(env: Mapping[str, str], ca_file: str) -> str:
    """The URL of Redis with user, password and certificates."""
    parts = urlsplit(env["TAILRACE_REDIS_URL"])
    password = secret_variable(env, "TAILRACE_REDIS_PASSWORD")
    if password:
        user = quote(env.get("TAILRACE_REDIS_USER", ""), safe="")
        place = parts.netloc.rpartition("@")[2]
        parts = parts._replace(netloc=f"{user}:{quote(password, safe='')}@{place}")
    if ca_file and parts.scheme == "rediss":
        query = "&".join(filter(None, [parts.query, f"ssl_ca_certs={quote(ca_file)}"]))
        parts = parts._replace(query=query)
    return urlunsplit(parts)


def advertised_host() -> str:
    """Name or address of this host for others: `TAILRACE_ADVERTISE_HOST` (of a pod: its address)."""
    return os.environ.get("TAILRACE_ADVERTISE_HOST", "") or socket.gethostname()


def this_host_id() -> str:
    """Identifies the host: host name and boot id, equal for two processes that can share memory."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip()[:8] if boot_id.exists() else "noboot"
    return f"{socket.gethostname()}-{boot}"
