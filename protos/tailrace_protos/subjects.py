"""Every subject, stream, bucket and key prefix, in one place; all begin with the run's name.

A run's name is one NATS token (letters, digits, `_`, `-`), so that several runs share one NATS
and one Redis without meeting.
"""

import re
from typing import Literal

Phase = Literal["train", "eval"]

PHASES: tuple[Phase, Phase] = ("train", "eval")

# Each name is a folder `services/tailrace_<name>`, a section of the experiment file and a NATS user.
SERVICES = (
    "scheduler",
    "agents",
    "gateway",
    "inference",
    "sandbox",
    "reward",
    "learner",
    "autoscaler",
    "weight_sync",
)

_RUN_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}\Z")


def check_run_name(run: str) -> str:
    """The name itself, or `ValueError` with the remedy when it could not be part of a subject."""
    if not _RUN_NAME.match(run):
        raise ValueError(
            f"exp_name {run!r} cannot name subjects: use 1 to 64 letters, digits, '_' or '-'"
        )
    return run


def generate(run: str, server_id: str) -> str:
    """Generation requests for one inference server."""
    return f"{run}.inference.{server_id}.generate"


def inference_control(run: str, server_id: str) -> str:
    """Control requests (drain) for one inference server."""
    return f"{run}.inference.{server_id}.control"


def inference_probe(run: str, server_id: str) -> str:
    """Requests of the scheduler to one inference server to sample a token."""
    return f"{run}.inference.{server_id}.probe"


def lease(run: str) -> str:
    """Placement leases, answered by the scheduler."""
    return f"{run}.scheduler.lease"


def lease_report(run: str) -> str:
    """Released and failed leases, which agents send to the scheduler."""
    return f"{run}.scheduler.lease_report"


def episodes_stopped(run: str) -> str:
    """Episodes that the scheduler has settled while they were played, for agents workers."""
    return f"{run}.scheduler.stopped"


def scheduler_began(run: str) -> str:
    """Announcement of a new scheduler to all who hold leases."""
    return f"{run}.scheduler.began"


def run_status(run: str) -> str:
    """Snapshots of the run for live views, published by the scheduler."""
    return f"{run}.scheduler.status"


def activity(run: str) -> str:
    """Activity of agents workers and inference servers, for idle attribution."""
    return f"{run}.activity"


def score(run: str) -> str:
    """Reward requests."""
    return f"{run}.reward.score"


def offer_weights(run: str) -> str:
    """The learner's request to weight_sync to take over new weights."""
    return f"{run}.weight_sync.offer"


def current_weights(run: str) -> str:
    """Request for the newest published weights (late joiners)."""
    return f"{run}.weight_sync.current"


def weight_route(run: str) -> str:
    """Request of an inference server for a holder from which it fetches weights."""
    return f"{run}.weight_sync.route"


def weight_broadcast(run: str) -> str:
    """Request of an inference server to be part of the next broadcast of weights."""
    return f"{run}.weight_sync.broadcast"


def weights_published(run: str) -> str:
    """Announcement of new weights to inference servers."""
    return f"{run}.weight_sync.published"


def weights_applied(run: str) -> str:
    """A server's report that it serves (or could not take) a policy version."""
    return f"{run}.weight_sync.applied"


def tool(name: str, run: str = "") -> str:
    """Calls of a tool: for every run, or for one run only (which wins where somebody listens)."""
    return f"{run}.tool.{name}" if run else f"tool.{name}"


def tool_worker(worker_id: str) -> str:
    """Messages for one tool worker: later calls of a session, probes, cancellations, releases."""
    return f"tool_worker.{worker_id}"


def gateway_open(run: str) -> str:
    """Requests for a session with the gateway."""
    return f"{run}.gateway.open"


def gateway_export(run: str) -> str:
    """Requests for the rows of a session."""
    return f"{run}.gateway.export"


def gateway_close(run: str) -> str:
    """Requests to forget a session."""
    return f"{run}.gateway.close"


def gateway_closed(run: str) -> str:
    """Announcements among gateway replicas that a session takes no more calls."""
    return f"{run}.gateway.closed"


def episodes(run: str, phase: Phase) -> str:
    """Subject of the work queue for episodes of one phase."""
    return f"{run}.episodes.{phase}"


def dead_episodes(run: str) -> str:
    """Dead letters: episodes that failed too often to be delivered again."""
    return f"{run}.dead.episodes"


def events(run: str) -> str:
    """Subject of the EVENTS stream."""
    return f"{run}.events"


def episodes_stream(run: str) -> str:
    """Name of the JetStream work queue."""
    return f"{run}_EPISODES"


def events_stream(run: str) -> str:
    """Name of the JetStream stream of what happened."""
    return f"{run}_EVENTS"


def dead_stream(run: str) -> str:
    """Name of the JetStream stream of dead letters."""
    return f"{run}_DEAD"


def registry_bucket(run: str) -> str:
    """Key-value bucket of inference servers (key: server id, value: `ServerStatus`)."""
    return f"{run}_servers"


def streams(run: str) -> tuple[str, ...]:
    """All JetStream streams of a run."""
    return (
        episodes_stream(run),
        events_stream(run),
        dead_stream(run),
        f"KV_{registry_bucket(run)}",
    )


def redis_prefix(run: str) -> str:
    """Prefix of every Redis key of a run; the braces keep a run's keys on one cluster slot."""
    return f"{{{run}}}:"
