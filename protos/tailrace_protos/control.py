"""Placement and health: the server registry, leases, activity and status snapshots."""

import enum

import msgspec

from tailrace_protos.base import Count, Finite, Message, PolicyVersion
from tailrace_protos.episode import Lease
from tailrace_protos.event import RunFailed
from tailrace_protos.subjects import Phase


class ServerState(enum.StrEnum):
    """State of an inference server."""

    STARTING = "starting"  # no weights yet
    READY = "ready"
    DRAINING = "draining"  # finishes its calls, accepts no new episode


class ServerStatus(Message, frozen=True, tag="server_status"):
    """Registry entry of an inference server, renewed at each heartbeat.

    Counters start at 0 with the process; two heartbeats give the rates between them.
    """

    server_id: str
    state: ServerState
    nats_subject: str
    zmq_endpoint: str  # empty when this server has no ZMQ channel
    host_id: str
    policy_version: PolicyVersion  # -1 before the first weights
    capacity_tokens: Count  # tokens that fit into its KV cache
    max_running: Count  # requests in one batch
    num_running: Count
    num_waiting: Count
    num_failed: Count  # calls with an internal error since the start
    idle_s: Finite  # time without work since the start
    busy_s: Finite
    heartbeat_unix_s: Finite
    zmq_public_key: str = ""  # CURVE key, when the cluster is more than one host
    incarnation: str = ""  # new at each start of its process
    used_tokens: Count = 0  # KV cache of running requests
    cached_tokens: Count = 0  # KV cache of kept prefixes; evictable
    host_capacity_tokens: Count = 0  # KV cache in host memory, for evicted prefixes; 0: none
    num_steps: Count = 0
    step_s: Finite = 0.0  # time in these steps
    num_generated_tokens: Count = 0
    num_computed_tokens: Count = 0  # forward tokens of any kind: sampled, prefilled, recomputed
    num_preemptions: Count = 0
    num_recomputed_tokens: Count = 0  # after an eviction or preemption, not after a weight update
    releases_prefixes: bool = False  # it forgets the contexts of ended episodes when it is told
    num_read_tokens: Count = 0  # KV tokens of the rows of a step, summed over steps; 0: not counted
    max_sequence_tokens: Count = 0  # of a prompt and its answer; 0: not known


def source_of(server_id: str, incarnation: str) -> str:
    """Names the sampling process; a restarted server is another source."""
    return f"{server_id}#{incarnation}" if incarnation else server_id


def split_source(source: str) -> tuple[str, str]:
    """Server id and incarnation of a source."""
    server_id, _, incarnation = source.partition("#")
    return server_id, incarnation


_BOUND = "!"  # at the end of a source


def bound_source(source: str) -> str:
    """Marks a source whose tokens a guide bound: their log-probabilities are not the free model's."""
    return source + _BOUND


def is_bound(source: str) -> bool:
    """Tells whether a guide bound the tokens of this source."""
    return source.endswith(_BOUND)


def free_source(source: str) -> str:
    """The source without the mark of bound tokens."""
    return source.removesuffix(_BOUND)


class DrainRequest(Message, frozen=True, tag="drain_request"):
    """Asks an inference server to drain and exit; it answers with its `ServerStatus`.

    With `incarnation`: only if the server still has it; a later one answers and stays.
    """

    reason: str = ""
    incarnation: str = ""


class ProbeRequest(Message, frozen=True, tag="probe_request"):
    """Asks an inference server to sample one token; it answers with its `ServerStatus`, or an error."""


class LeaseRequest(Message, frozen=True, tag="lease_request"):
    """Request for servers for these episodes.

    A worker asks when an episode has no server, when its server failed or refused it, and after a tool
    call longer than `Lease.ask_after_s`. After a failure, `failed_server_id` names the server to avoid
    if possible; only `LeaseReport` counts failures against a server.
    """

    worker_id: str
    episode_ids: tuple[str, ...]
    context_tokens: tuple[Count, ...]  # of the next prompt per episode, same order; 0: unknown
    failed_server_id: str = ""


class LeaseReply(Message, frozen=True, tag="lease_reply"):
    """Leases for episodes of the request; the others wait for room: ask again after `retry_after_s`."""

    leases: tuple[Lease, ...]
    retry_after_s: Finite = 0.0


class EpisodeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Newest state of an episode at the worker that plays it."""

    episode_id: str
    server_id: str
    context_tokens: Count  # prompt of the running turn, or all tokens after a turn
    is_waiting: bool  # for a tool, an environment or a reward: nothing decodes


class LeaseReport(Message, frozen=True, tag="lease_report"):
    """Ended episodes of a worker, and its failed and successful calls since the last report."""

    worker_id: str
    released: tuple[str, ...] = ()  # episode ids
    failures: dict[str, Count] = msgspec.field(default_factory=dict)  # server id -> failed calls
    successes: dict[str, Count] = msgspec.field(default_factory=dict)  # server id -> completed calls
    states: tuple[EpisodeState, ...] = ()  # that changed; all of them after `SchedulerBegan`


class SchedulerBegan(Message, frozen=True, tag="scheduler_began"):
    """A scheduler has taken over the run: workers tell the states of all their episodes again."""

    instance_id: str


class EpisodesStopped(Message, frozen=True, tag="episodes_stopped"):
    """Episodes that the scheduler has settled; a worker that plays one stops it at once."""

    episode_ids: tuple[str, ...]
    reason: str = ""


class AgentActivity(Message, frozen=True, tag="agent_activity"):
    """Number of episodes of one agents worker in each state."""

    worker_id: str
    num_generating: Count
    num_in_tools: Count  # environment steps and tools
    num_in_reward: Count
    num_settling: Count  # journal and trajectory writes
    unix_s: Finite
    waiting_groups: tuple[str, ...] = ()  # with an episode that no agent outside has leased yet
    context_limit: Count = 0  # tokens of the longest episode that it plays; 0: it plays none
    max_episodes: dict[Phase, Count] = msgspec.field(default_factory=dict)  # that it plays at once


class RunStatus(Message, frozen=True, tag="run_status"):
    """Status of the run for live views, published twice a second by the scheduler."""

    step: int
    max_steps: int
    policy_version: PolicyVersion
    num_episodes_running: Count
    num_groups_running: Count
    num_groups_ready: Count
    num_servers: Count
    reward_mean: float | None
    success_rate: float | None
    eval_success_rate: float | None
    staleness_mean: float | None
    tokens_per_s: float | None
    phase: str  # starting, warm_start, evaluating, training, finishing, finished, failed
    elapsed_s: float
    eta_s: float | None
    blocked_by: str = ""  # reason for stopped admission: credit, buffer, servers, weights, or empty
    num_failures: Count = 0  # episodes that ended as infra_failure or timeout
    newest_failure: str = ""  # reason of the newest of them
    hints: tuple[str, ...] = ()  # that hold now
    progress_unix_s: float = 0.0  # of the newest valid episode, step or evaluation
    failed: RunFailed | None = None  # with phase `failed`
    ended_early: str = ""  # why training ended before `max_steps`
    eval_greedy_success_rate: float | None = None  # at temperature 0; null without `eval_greedy`
    warm_start_step: int = 0  # of `warm_start_num_steps`; 0 before the first
    warm_start_num_steps: int = 0
