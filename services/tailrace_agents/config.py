"""Configuration of the agents service: the section `agents` of an experiment file."""

import re
from typing import Any, Literal

import msgspec

from tailrace.channel.config import ClientChannelConfig
from tailrace.config import Config, RunConfig
from tailrace.data.config import DatasetEntry


def _require_positive(config: Config, key: str) -> None:
    if getattr(config, key) <= 0:
        raise ValueError(f"{key} must be positive")


def _require_hashes(tool_schemas: dict[str, str]) -> None:
    for name, schema in tool_schemas.items():
        if not re.fullmatch("[0-9a-f]{8}", schema):
            raise ValueError(
                f"tool_schemas.{name}: {schema!r} is no hash: copy its 8 letters from "
                "`tailrace tools ls`"
            )


class EnvEntry(Config, frozen=True, kw_only=True):
    """One environment under `custom_envs`."""

    env_type: str
    """Kind of environment, for example `frozen_lake`."""

    env_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of that kind of environment, for example `size`, `max_turns`, `split`."""

    max_tokens_per_step: int = 512
    """Tokens that one reply may have. A longer reply is cut; the environment gets the cut text."""

    max_turns: int = 500
    """Turns of an episode, above any bound of the environment's own; an environment that has not ended
    by then is cut off, and the episode is a policy failure that keeps its rewards."""

    history_turns: int | None = None
    """With `granularity: step`: number of earlier turns that the policy sees before the newest
    observation. 0: none. null: all. The policy always sees the task (rules, question).
    `max_episode_tokens` then bounds each prompt. Loops and workflows choose each call's messages."""

    in_threads: bool | None = None
    """true: `reset` and `step` run in threads; use it if they wait or compute for longer than a
    millisecond. false: they run in the event loop. This is faster for quick environments, but while one
    step runs, all other episodes of this worker stop. null: the attribute `waits` of the environment's
    class decides; it is true for `verifiers` and `openenv`."""

    def __post_init__(self) -> None:
        for key in ("max_tokens_per_step", "max_turns"):
            _require_positive(self, key)
        if self.history_turns is not None and self.history_turns < 0:
            raise ValueError("history_turns must not be negative; null is all turns")


class GeneratingArgs(Config, frozen=True, kw_only=True):
    """Sampling of replies."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to this value; 1: from all."""

    top_k: int = 0
    """Sample from this number of likeliest tokens; 0: from all."""

    min_p: float = 0.0
    """Exclude tokens with less than this share of the probability of the most likely token."""

    stop: tuple[str, ...] = ()
    """Texts that end a reply, in addition to the model's end of turn."""

    max_new_tokens: int = 4096
    """Tokens that an episode may sample over all its turns; then it ends as a policy failure."""

    def __post_init__(self) -> None:
        _require_positive(self, "max_new_tokens")
        if self.temperature < 0 or self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ValueError("temperature and top_k must not be negative, min_p must be 0 to 1")
        if not 0 < self.top_p <= 1:
            raise ValueError("top_p must be above 0 and at most 1")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which ends every reply at once: remove it")


class LoopArgs(Config, frozen=True, kw_only=True):
    """Limits of an agent loop's episode, and its export as rows to train."""

    max_turns: int = 16
    """Model calls of an episode; then it ends as a policy failure."""

    tool_timeout_s: float = 75.0
    """Time limit of one tool call; after it the model reads that the call took too long. A shorter
    `timeout_s` of the tool itself takes precedence."""

    max_tool_s: float = 300.0
    """Seconds of an episode in which tools may run (parallel calls count once). After that, every call
    gets the answer that this time is used up."""

    max_tool_output_chars: int = 16_384
    """Maximum length of a tool result. A longer one is cut in its middle, where a mark says so, and
    counted (`num_cut_tool_outputs`). 0: no limit."""

    export_style: Literal["concat", "individual"] | None = None
    """null: follows the run's `granularity`. `concat` (the same as `trajectory`): a conversation is
    one row; if it forks, each branch is a row, and a shared token is trained once. `individual`: every
    model call is a separate row with its own return. Refused with `granularity: step`."""

    turn_discount: float = 1.0
    """A call's return is its reward plus this share of the return of the call that follows."""

    reward_scope: Literal["episode", "conversation", "last"] = "episode"
    """Calls that a reward of the whole episode (a number, or the reward service's) reaches. `episode`:
    all calls, however the loop cuts its conversations; these follow each other in time, with
    `turn_discount` between them. `conversation`: the message tree of the last call, with its forks.
    `last`: the last call and those that it continues. Calls with a reward by id keep their own."""

    def __post_init__(self) -> None:
        for key in ("max_turns", "tool_timeout_s", "max_tool_s"):
            _require_positive(self, key)
        if self.max_tool_output_chars < 0 or not 0.0 <= self.turn_discount <= 1.0:
            raise ValueError("max_tool_output_chars must not be negative, turn_discount must be 0 to 1")


class WorkflowArgs(Config, frozen=True, kw_only=True):
    """Your own agent, which plays the rows of data sets through the gateway."""

    agent: str = ""
    """Your class, `my_module.MyAgent` or `my_module:MyAgent`, with `async def run(self, data)`. Empty
    with `mode: outside`."""

    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of its constructor."""

    datasets: tuple[str, ...] = ()
    """Data sets of `agents.datasets` whose rows it plays; empty: all of them."""

    mode: Literal["inline", "subproc", "outside"] = "inline"
    """`outside`: agents that run anywhere lease the rows from the gateway over HTTP (`/v1/episodes`).
    `inline`: many episodes at once in the event loop of the agents service. `subproc`: in processes,
    for agents that block, compute, or take their endpoint from environment variables."""

    python: str = ""
    """Python interpreter of the processes with `mode: subproc`. Name that of another environment with
    Tailrace in it if the agent's packages conflict with ours. Empty: the service's own."""

    subproc_max_workers: int = 4
    """Processes of each agents worker with `mode: subproc`; each plays one episode at a time."""

    lease_s: float = 120.0
    """With `mode: outside`: seconds without a model call or a renewal after which another agent gets
    the episode."""

    timeout_s: float = 3600.0
    """Time limit of one run; the deadline of its group (`scheduler.group_timeout_s`) applies too. With
    `mode: outside` both count from the episode's first lease. A longer run is ended; with
    `mode: subproc` its process is killed."""

    max_blocked_s: float = 15.0
    """With `mode: inline`: a run that blocks the event loop for longer is interrupted and ends as a
    timeout. A worker that stays blocked four times as long exits. 0: no limit."""

    turn_discount: float = 1.0
    """A call's return is its reward plus this share of the mean return of the calls that follow it."""

    reward_scope: Literal["episode", "conversation", "last"] = "episode"
    """Calls that a reward of the whole episode (a number, or the reward service's) reaches. `episode`:
    all calls, however the agent cuts its conversations; these follow each other in time, with
    `turn_discount` between them. `conversation`: the message tree of the last call, with its forks.
    `last`: the last call and those that it continues. Calls with a reward by id keep their own."""

    export_style: Literal["individual", "concat"] | None = None
    """As `loop_args.export_style`: null follows the run's `granularity`; `concat`; or `individual`:
    every model call is a separate row with its own return."""

    http_library: Literal["auto", "httpx", "httpx2"] = "auto"
    """Library of the `AsyncClient` that `http_client` is; `auto`: httpx2 if it is installed."""

    def __post_init__(self) -> None:
        if not self.agent and self.mode != "outside":
            raise ValueError("agent must name a class: my_module.MyAgent")
        if self.agent and self.mode == "outside":
            raise ValueError("agent and mode: outside contradict each other: remove one of them")
        for key in ("subproc_max_workers", "timeout_s", "lease_s"):
            _require_positive(self, key)
        if self.python and self.mode != "subproc":
            raise ValueError("python needs mode: subproc")
        if self.max_blocked_s < 0 or not 0.0 <= self.turn_discount <= 1.0:
            raise ValueError("max_blocked_s must not be negative, turn_discount must be 0 to 1")


class AgentsConfig(Config, frozen=True, kw_only=True):
    """The agents service."""

    custom_envs: dict[str, EnvEntry] = msgspec.field(default_factory=dict)
    """Environments by name. Tasks use these names (`scheduler` chooses them)."""

    datasets: dict[str, DatasetEntry] = msgspec.field(default_factory=dict)
    """Data sets by name. Tasks use these names; agent loops play the rows."""

    agent_loops: dict[str, str] = msgspec.field(default_factory=dict)
    """Your own agent loops, `module:Class`, by the name that rows have as `agent_name`. The built-in
    loops `single_turn_agent` and `tool_agent` need no entry."""

    loop_args: LoopArgs = LoopArgs()
    """Limits of agent loops."""

    tool_schemas: dict[str, str] = msgspec.field(default_factory=dict)
    """Hashes of tools' schemas by tool name, as `tailrace tools ls` shows them. A loop's episode with
    such a tool fails while a worker serves it with another schema, so that all episodes of a run read
    one prompt. Tools without an entry are not checked."""

    workflow: WorkflowArgs | None = None
    """Your own agent, which plays the rows of data sets instead of an agent loop."""

    generating_args: GeneratingArgs = GeneratingArgs()
    """Sampling of training episodes."""

    greedy_baseline: bool = False
    """Play the first member of every training group at temperature 0, as the baseline of
    `learner.adv_estimator: remax`; it is not trained."""

    seeded_rollouts: bool = False
    """Give each turn of a training episode a seed that follows from the task, its place in the data
    order, the member and the turn. With `max_staleness: 0` a run with the same `seed` then repeats its
    rewards, losses and gradient norms up to rounding."""

    eval_generating_args: GeneratingArgs = GeneratingArgs()
    """Sampling of evaluation episodes. The seed of each turn depends only on the task, the member
    and the turn, so evaluations are comparable."""

    max_episode_tokens: int = 8192
    """Length of an episode in tokens, inserted and sampled; at most the engine's context length."""

    max_concurrent_episodes: int = 1024
    """Episodes that one worker plays at once, of each phase (training, evaluation)."""

    max_concurrent_eval_episodes: int | None = None
    """As `max_concurrent_episodes`, for evaluation; null: the same number."""

    env_threads: int = 16
    """Threads of one worker for environments with `in_threads`."""

    max_generation_attempts: int = 10
    """Number of consecutive calls that fail without a token before an episode ends as an infrastructure
    failure. Delays between them grow from 50 ms to 3 s."""

    reward_timeout_s: float = 30.0
    """Time limit of one request to the reward service; after it the request is sent again. It must be
    at least the longest `timeout_s` of the rewards."""

    drain_s: float = 5.0
    """At SIGTERM, episodes stop after their current turn; turns that take longer than this are
    cancelled. All episodes are handed back, and another worker resumes them."""

    max_deliveries: int = 10
    """Maximum deliveries of an episode (its worker died each time); then it becomes a dead letter."""

    render_episodes: int = 8
    """Number of episodes of an evaluation, those of the lowest seeds, that are saved as pictures. They
    replace the pictures of the evaluation before. 0: none."""

    keep_episodes: int = 32
    """Number of tasks of an evaluation, those of the lowest seeds, whose episodes are kept as text in
    `<run_dir>/episodes/`, for `report.html`. 0: none."""

    transport: Literal["nats", "zmq"] = "zmq"
    """Transport of generation requests: `zmq` to the inference servers, `nats` through nats-server.
    The servers must offer it (`inference.transports`)."""

    channel: ClientChannelConfig = ClientChannelConfig()
    """Bounds of the connection to the inference servers."""

    def __post_init__(self) -> None:
        for key in ("max_episode_tokens", "max_concurrent_episodes", "env_threads"):
            _require_positive(self, key)
        for key in ("max_generation_attempts", "reward_timeout_s", "max_deliveries"):
            _require_positive(self, key)
        for key in ("render_episodes", "keep_episodes", "drain_s"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if self.max_concurrent_eval_episodes is not None:
            _require_positive(self, "max_concurrent_eval_episodes")
        _require_hashes(self.tool_schemas)
        for name in self.custom_envs.keys() & self.datasets.keys():
            raise ValueError(f"{name!r} is in custom_envs and in datasets: rename one of them")
        for name in self.workflow.datasets if self.workflow else ():
            if name not in self.datasets:
                raise ValueError(f"workflow.datasets: {name!r} is not in datasets: define it there")

    def is_played_by_workflow(self, dataset: str) -> bool:
        """True if the workflow plays the rows of this data set; else an agent loop does."""
        return self.workflow is not None and dataset in (self.workflow.datasets or self.datasets)

    def max_in_flight(self, phase: str) -> int:
        """Episodes of a phase that a worker takes; no more than it has processes to play them in."""
        wanted = self.max_concurrent_episodes
        if phase == "eval" and self.max_concurrent_eval_episodes is not None:
            wanted = self.max_concurrent_eval_episodes
        workflow = self.workflow
        if workflow is None or workflow.mode != "subproc" or self.custom_envs:
            return wanted
        if not all(map(self.is_played_by_workflow, self.datasets)):
            return wanted
        return min(wanted, workflow.subproc_max_workers)


def check_with_run(config: AgentsConfig, run: RunConfig) -> None:
    """Raises `ValueError` for settings that conflict with the run's."""
    for name, entry in config.custom_envs.items():
        if entry.history_turns is not None and run.granularity != "step":
            raise ValueError(
                f"agents.custom_envs.{name}.history_turns needs granularity: step, since a row of a "
                "whole episode has all its turns: remove it or set that"
            )
    given = {"loop_args": config.loop_args.export_style}
    if config.workflow is not None:
        given["workflow"] = config.workflow.export_style
    for section, style in given.items():
        if run.granularity == "step" and style is not None:
            raise ValueError(
                f"agents.{section}.export_style {style!r} and granularity 'step' both say what is a "
                "row: remove the first"
            )
