"""Configuration of the agents service: the section `agents` of an experiment file."""

from typing import Any, Literal

import msgspec

from tailrace.channel.config import ClientChannelConfig
from tailrace.config import Config, RunConfig
from tailrace.data.config import DatasetEntry


def _require_positive(config: Config, key: str) -> None:
    if getattr(config, key) <= 0:
        raise ValueError(f"{key} must be positive")


class EnvEntry(Config, frozen=True, kw_only=True):
    """One environment under `custom_envs`."""

    env_type: str
    """Kind of environment, for example `frozen_lake`."""

    env_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of that kind of environment, for example `size`, `max_turns`, `split`."""

    max_tokens_per_step: int = 512
    """Tokens that one reply may have; a longer one is cut and given to the environment as it is."""

    history_turns: int | None = None
    """With `granularity: step`: how many earlier turns the policy sees before the newest observation, 0
    only that. null: all of them. The task (rules, question) stays in sight. `max_episode_tokens` then
    bounds what the policy sees at once. Loops and workflows choose the messages of every call."""

    in_threads: bool | None = None
    """true: `reset` and `step` run in threads, for environments that wait or compute for longer than a
    millisecond. false: they run in the event loop, which is faster for quick ones and stops
    every episode of this worker while one step runs. null: as the environment's class says (`waits`),
    which is true of `verifiers` and `openenv`."""

    def __post_init__(self) -> None:
        _require_positive(self, "max_tokens_per_step")
        if self.history_turns is not None and self.history_turns < 0:
            raise ValueError("history_turns must not be negative; null is all turns")


class GeneratingArgs(Config, frozen=True, kw_only=True):
    """Sampling of replies."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability together; 1: from all."""

    top_k: int = 0
    """Sample from this number of likeliest tokens; 0: from all."""

    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability."""

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


class LoopArgs(Config, frozen=True, kw_only=True):
    """Limits of an agent loop's episode, and its export as rows to train."""

    max_turns: int = 16
    """Model calls of an episode; then it ends as a policy failure."""

    tool_timeout_s: float = 60.0
    """Seconds that one tool call may take; the model then reads that it took too long. A tool's own
    `timeout_s` counts if it is shorter."""

    max_tool_s: float = 300.0
    """Seconds of an episode in which a tool is at work (calls at the same time count once); after that
    every call is answered by the news that this time is used up."""

    max_tool_output_chars: int = 16_384
    """A longer tool result is cut in its middle, with a mark that says so, and counted
    (`num_cut_tool_outputs`). 0: never."""

    export_style: Literal["concat", "individual"] | None = None
    """null: follows the run's `granularity`. `concat` (the same as `trajectory`): a conversation is
    one row; if it forks, each branch is a row, and a shared token is trained once. `individual`: every
    model call is a separate row with its own return. Refused with `granularity: step`."""

    turn_discount: float = 1.0
    """A call's return is its reward plus this share of the return of the call that follows."""

    def __post_init__(self) -> None:
        for key in ("max_turns", "tool_timeout_s", "max_tool_s"):
            _require_positive(self, key)
        if self.max_tool_output_chars < 0 or not 0.0 <= self.turn_discount <= 1.0:
            raise ValueError("max_tool_output_chars must not be negative, turn_discount must be 0 to 1")


class WorkflowArgs(Config, frozen=True, kw_only=True):
    """An agent of yours that plays the rows of data sets through the gateway."""

    agent: str
    """Your class, `my_module.MyAgent` or `my_module:MyAgent`, with `async def run(self, data)`."""

    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of its constructor."""

    datasets: tuple[str, ...] = ()
    """Data sets of `agents.datasets` whose rows it plays; empty: all of them."""

    mode: Literal["inline", "subproc"] = "inline"
    """`inline`: many episodes at once in the agents' event loop. `subproc`: in processes, for agents
    that block, compute, or take their endpoint from environment variables."""

    python: str = ""
    """Interpreter of the processes with `mode: subproc`: that of another environment, with Tailrace in
    it, for agents whose packages do not go with ours. Empty: the agents' own."""

    subproc_max_workers: int = 4
    """Processes of each agents worker with `mode: subproc`; each plays one episode at a time."""

    timeout_s: float = 3600.0
    """Time limit of one run; the deadline of its group (`scheduler.group_timeout_s`) applies
    too. A longer run is ended; with `mode: subproc` its process is killed."""

    max_blocked_s: float = 15.0
    """With `mode: inline`: a run that holds the event loop for longer is interrupted and ends as a
    timeout; a worker that stays blocked four times as long ends. 0: never."""

    turn_discount: float = 1.0
    """A call's return is its reward plus this share of the mean return of the calls that follow it."""

    export_style: Literal["individual", "concat"] | None = None
    """As `loop_args.export_style`: null follows the run's `granularity`; `concat`; or `individual`:
    every model call is a separate row with its own return."""

    http_library: Literal["auto", "httpx", "httpx2"] = "auto"
    """Library of the `AsyncClient` that `http_client` is; `auto`: httpx2 if it is installed."""

    def __post_init__(self) -> None:
        if not self.agent:
            raise ValueError("agent must name a class: my_module.MyAgent")
        for key in ("subproc_max_workers", "timeout_s"):
            _require_positive(self, key)
        if self.python and self.mode != "subproc":
            raise ValueError("python needs mode: subproc")
        if self.max_blocked_s < 0 or not 0.0 <= self.turn_discount <= 1.0:
            raise ValueError("max_blocked_s must not be negative, turn_discount must be 0 to 1")


class AgentsConfig(Config, frozen=True, kw_only=True):
    """The agents service."""

    custom_envs: dict[str, EnvEntry] = msgspec.field(default_factory=dict)
    """Environments by the name that tasks use (`scheduler` chooses the names)."""

    datasets: dict[str, DatasetEntry] = msgspec.field(default_factory=dict)
    """Data sets by the name that tasks use; their rows are played by agent loops."""

    agent_loops: dict[str, str] = msgspec.field(default_factory=dict)
    """Your own agent loops, `module:Class`, by the name that rows have as `agent_name`. Known without
    being named here: `single_turn_agent` and `tool_agent`."""

    loop_args: LoopArgs = LoopArgs()
    """Limits of agent loops."""

    workflow: WorkflowArgs | None = None
    """An agent of yours that plays the rows of data sets instead of an agent loop."""

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
    """Length of an episode in tokens, inserted and sampled together: at most the engine's context."""

    max_concurrent_episodes: int = 1024
    """Episodes that one worker plays at once, of each phase (training, evaluation)."""

    max_concurrent_eval_episodes: int | None = None
    """As `max_concurrent_episodes`, of evaluation; null: the same number."""

    env_threads: int = 16
    """Threads of one worker for environments with `in_threads`."""

    max_generation_attempts: int = 10
    """Calls in a row that may fail without bringing a token before an episode ends as an infrastructure
    failure. Delays between them grow from 50 ms to 3 s."""

    reward_timeout_s: float = 30.0
    """Time limit of one request to the reward service; then it is sent again. At least the
    longest `timeout_s` of the rewards."""

    drain_s: float = 5.0
    """At SIGTERM episodes stop after the turn they are in; those that need longer are cut off then. All
    are handed back and resumed by another worker."""

    max_deliveries: int = 10
    """An episode that is delivered more often than this (its worker died each time) is put aside."""

    render_episodes: int = 8
    """So many episodes of an evaluation (those of the lowest seeds) are saved as pictures, replacing
    those of the evaluation before. 0: none."""

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
        for key in ("render_episodes", "drain_s"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if self.max_concurrent_eval_episodes is not None:
            _require_positive(self, "max_concurrent_eval_episodes")
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
        if workflow is None or workflow.mode == "inline" or self.custom_envs:
            return wanted
        if not all(map(self.is_played_by_workflow, self.datasets)):
            return wanted
        return min(wanted, workflow.subproc_max_workers)


def check_with_run(config: AgentsConfig, run: RunConfig) -> None:
    """Raise `ValueError` for settings that are possible alone but not together with the run's."""
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
