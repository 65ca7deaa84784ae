"""Placement and health: the server registry, leases, activity and status snapshots."""

import enum

import msgspec

from tailrace_protos.base import Message
from tailrace_protos.event import RunFailed


class ServerState(enum.StrEnum):
    """State of an inference server."""

    STARTING = "starting"  # no weights yet
    READY = "ready"
    DRAINING = "draining"  # finishes its calls, accepts no new episode


class ServerStatus(Message, frozen=True, tag="server_status"):
    """Registry entry of an inference server, renewed at each heartbeat."""

    server_id: str
    state: ServerState
    nats_subject: str
    zmq_endpoint: str  # empty when this server has no ZMQ channel
    host_id: str
    policy_version: int  # -1 before the first weights
    capacity_tokens: int  # tokens that fit into its KV cache
    max_running: int  # requests in one batch
    num_running: int
    num_waiting: int
    num_failed: int  # calls with an internal error since the start
    idle_s: float  # time without work since the start
    busy_s: float
    heartbeat_unix_s: float
    zmq_public_key: str = ""  # CURVE key, when the cluster is more than one host
    incarnation: str = ""  # new at each start of its process


def source_of(server_id: str, incarnation: str) -> str:
    """Names the sampling process; a restarted server is another source."""
    return f"{server_id}#{incarnation}" if incarnation else server_id


def split_source(source: str) -> tuple[str, str]:
    """Server id and incarnation of a source."""
    server_id, _, incarnation = source.partition("#")
    return server_id, incarnation


class DrainRequest(Message, frozen=True, tag="drain_request"):
    """Asks an inference server to drain and exit; it answers with its `ServerStatus`.

    With `incarnation`: only if the server still has it; a later one answers and stays.
    """

    reason: str = ""
    incarnation: str = ""


class LeaseRequest(Message, frozen=True, tag="lease_request"):
    """Request for servers for these episodes.

    After a failure, `failed_server_id` names the server to avoid if possible; only `LeaseReport` counts
    failures against a server.
    """

    worker_id: str
    episode_ids: tuple[str, ...]
    predicted_tokens: tuple[int, ...]  # remaining tokens per episode, same order
    failed_server_id: str = ""


class Lease(msgspec.Struct, frozen=True):
    """One episode's server, valid until the episode ends or the server fails."""

    episode_id: str
    server_id: str
    nats_subject: str
    zmq_endpoint: str
    zmq_public_key: str = ""
    incarnation: str = ""


class LeaseReply(Message, frozen=True, tag="lease_reply"):
    """Leases in the order of the request; empty with `retry_after_s` while no server is healthy."""

    leases: tuple[Lease, ...]
    retry_after_s: float = 0.0


class LeaseReport(Message, frozen=True, tag="lease_report"):
    """Ended episodes of a worker, and its failed and successful calls since the last report."""

    worker_id: str
    released: tuple[str, ...] = ()  # episode ids
    failures: dict[str, int] = msgspec.field(default_factory=dict)  # server id -> failed calls
    successes: dict[str, int] = msgspec.field(default_factory=dict)  # server id -> completed calls


class AgentActivity(Message, frozen=True, tag="agent_activity"):
    """Number of episodes of one agents worker in each state."""

    worker_id: str
    num_generating: int
    num_in_tools: int  # environment steps and tools
    num_in_reward: int
    num_settling: int  # journal and trajectory writes
    unix_s: float
    waiting_groups: tuple[str, ...] = ()  # with an episode that no agent outside has leased yet


class RunStatus(Message, frozen=True, tag="run_status"):
    """Status of the run for live views, published twice a second by the scheduler."""

    step: int
    max_steps: int
    policy_version: int
    num_episodes_running: int
    num_groups_running: int
    num_groups_ready: int
    num_servers: int
    reward_mean: float | None
    success_rate: float | None
    eval_success_rate: float | None
    staleness_mean: float | None
    tokens_per_s: float | None
    phase: str  # starting, warm_start, evaluating, training, finishing, finished, failed
    elapsed_s: float
    eta_s: float | None
    blocked_by: str = ""  # reason for stopped admission: credit, buffer, servers, weights, or empty
    num_failures: int = 0  # episodes that ended as infra_failure or timeout
    newest_failure: str = ""  # reason of the newest of them
    hints: tuple[str, ...] = ()  # that hold now
    progress_unix_s: float = 0.0  # of the newest valid episode, step or evaluation
    failed: RunFailed | None = None  # with phase `failed`
    eval_greedy_success_rate: float | None = None  # at temperature 0; null without `eval_greedy`
