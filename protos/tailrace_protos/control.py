"""Placement and health: the server registry, leases, activity and status snapshots."""

from __future__ import annotations

import enum

import msgspec

from tailrace_protos.base import Message


class ServerState(enum.StrEnum):
    """Readiness of an inference server."""

    STARTING = "starting"  # no weights yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes no new episode


class ServerStatus(Message, frozen=True, tag="server_status"):
    """An inference server's entry in the registry, rewritten every heartbeat."""

    server_id: str
    state: ServerState
    nats_subject: str
    zmq_endpoint: str  # empty when this server has no ZMQ channel
    host_id: str
    policy_version: int  # -1 before the first weights
    capacity_tokens: int  # tokens that fit its KV cache
    max_running: int  # requests batched at once
    num_running: int
    num_waiting: int
    num_failed: int  # calls that ended with an internal error since it started
    idle_s: float  # time with nothing to compute since it started
    busy_s: float
    heartbeat_unix_s: float
    zmq_public_key: str = ""  # CURVE key, when the cluster is more than one host
    incarnation: str = ""  # another one after each start of its process


def source_of(server_id: str, incarnation: str) -> str:
    """Names the process that samples: a server that was started again is another source."""
    return f"{server_id}#{incarnation}" if incarnation else server_id


def split_source(source: str) -> tuple[str, str]:
    """Server id and incarnation of a source."""
    server_id, _, incarnation = source.partition("#")
    return server_id, incarnation


class DrainRequest(Message, frozen=True, tag="drain_request"):
    """Tells an inference server to leave; it answers with its `ServerStatus`.

    With `incarnation`: only if it is still that one; a later one answers and goes on.
    """

    reason: str = ""
    incarnation: str = ""


class LeaseRequest(Message, frozen=True, tag="lease_request"):
    """Asks for servers for these episodes. After a failure it names `failed_server_id`: then they go to
    other servers if there are any. `LeaseReport` says whether that server is to blame.
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
    """Leases in the order asked; empty with `retry_after_s` while no server is healthy."""

    leases: tuple[Lease, ...]
    retry_after_s: float = 0.0


class LeaseReport(Message, frozen=True, tag="lease_report"):
    """Episodes of a worker that ended, and servers that failed it since its last report."""

    worker_id: str
    released: tuple[str, ...] = ()  # episode ids
    failures: dict[str, int] = msgspec.field(default_factory=dict)  # server id -> failed calls
    successes: dict[str, int] = msgspec.field(default_factory=dict)  # server id -> completed calls


class AgentActivity(Message, frozen=True, tag="agent_activity"):
    """Number of one agents worker's episodes in each state at this moment."""

    worker_id: str
    num_generating: int
    num_in_tools: int  # environment steps and tools
    num_in_reward: int
    num_settling: int  # journal and trajectory writes
    unix_s: float


class RunStatus(Message, frozen=True, tag="run_status"):
    """Live status of a run, which the scheduler publishes twice a second."""

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
    phase: str  # starting, warm_start, evaluating, training, finishing, finished
    elapsed_s: float
    eta_s: float | None
    blocked_by: str = ""  # why nothing is admitted now: credit, buffer, servers, weights, or empty
