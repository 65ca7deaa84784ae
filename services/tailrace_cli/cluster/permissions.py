"""Subjects that each service's NATS user may publish and subscribe to: its own only.

Inboxes are per user, so nobody can listen to another's replies. Answers to requests need no entry: the
server allows a reply to whoever was asked (`allow_responses`); token streams outlive that and have one.
"""

from typing import Any

from tailrace_protos import subjects

SERVICE_USERS = (*subjects.SERVICES, "tools", "cli")  # "tools": tool workers outside the services

# nats-server remembers every request for so long. The caller of a tool that takes longer asks again.
_ANSWERS = {"max": 16, "expires": "10m"}


def nats_permissions(user: str, run: str) -> dict[str, Any]:
    """nats-server's `permissions` block of one service user."""
    publish, subscribe = _RIGHTS[user](run) if user in _RIGHTS else _answers(user, run)
    return {
        "publish": {"allow": publish or ["$SYS._UNUSED"]},
        "subscribe": {"allow": [f"_INBOX.{user}.>", "$SRV.>", *subscribe]},
        "allow_responses": _ANSWERS,
    }


def _stream(name: str) -> list[str]:
    """JetStream's API for one stream: create, read, consume, acknowledge."""
    return [
        f"$JS.API.STREAM.*.{name}",
        f"$JS.API.STREAM.*.*.{name}",
        f"$JS.API.CONSUMER.*.{name}",
        f"$JS.API.CONSUMER.*.{name}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{name}.>",
        f"$JS.API.DIRECT.GET.{name}",
        f"$JS.API.DIRECT.GET.{name}.>",
        f"$JS.ACK.{name}.>",
    ]


def _registry(run: str) -> str:
    return f"$KV.{subjects.registry_bucket(run)}.>"


Rights = tuple[list[str], list[str]]


def _scheduler(run: str) -> Rights:
    streams = (
        subjects.episodes_stream(run),
        subjects.events_stream(run),
        subjects.dead_stream(run),
        f"KV_{subjects.registry_bucket(run)}",
    )
    publish = [right for stream in streams for right in _stream(stream)]
    publish += ["$JS.API.INFO", f"{run}.episodes.*", f"{run}.dead.>", subjects.events(run)]
    publish += [subjects.run_status(run), subjects.inference_control(run, "*")]
    subscribe = [f"{run}.scheduler.>", subjects.activity(run), f"{run}.weight_sync.>", _registry(run)]
    return publish, subscribe


def _agents(run: str) -> Rights:
    publish = [*_stream(subjects.episodes_stream(run)), f"{run}.episodes.*", f"{run}.dead.>"]
    publish += [subjects.lease(run), subjects.lease_report(run), subjects.activity(run)]
    publish += [subjects.score(run), subjects.generate(run, "*")]
    publish += [subjects.gateway_open(run), subjects.gateway_export(run), subjects.gateway_close(run)]
    publish += [*_any_tool(run), "$SRV.>"]
    return publish, []


def _gateway(run: str) -> Rights:
    publish = [subjects.lease(run), subjects.lease_report(run), subjects.activity(run)]
    publish += [subjects.generate(run, "*"), subjects.gateway_closed(run)]
    return publish, [f"{run}.gateway.>"]


def _tools(run: str) -> Rights:
    return [], _any_tool(run)


def _any_tool(run: str) -> list[str]:
    return [subjects.tool(">"), subjects.tool(">", run), subjects.tool_worker("*")]


def _inference(run: str) -> Rights:
    publish = [_registry(run), *_stream(f"KV_{subjects.registry_bucket(run)}")]
    publish += [subjects.current_weights(run), subjects.weights_applied(run), subjects.activity(run)]
    publish += ["_INBOX.agents.>", "_INBOX.gateway.>", "_INBOX.cli.>"]
    return publish, [f"{run}.inference.>", subjects.weights_published(run)]


def _answers(service: str, run: str) -> Rights:
    """Rights of a service that only answers requests on its own subjects."""
    return [], [f"{run}.{service}.>"]


def _reward(run: str) -> Rights:
    """Programs are tested by the sandbox's tool; a judge may be asked through the gateway."""
    sessions = [subjects.gateway_open(run), subjects.gateway_close(run)]
    return [*_any_tool(run), *sessions, "$SRV.>"], [f"{run}.reward.>"]


def _learner(run: str) -> Rights:
    return [subjects.offer_weights(run)], []


def _weight_sync(run: str) -> Rights:
    return [subjects.weights_published(run)], [f"{run}.weight_sync.>"]


def _cli(run: str) -> Rights:
    publish = ["$SRV.>", subjects.generate(run, "*"), *_any_tool(run)]
    return publish, [subjects.run_status(run), subjects.events(run)]


_RIGHTS = {
    "scheduler": _scheduler,
    "agents": _agents,
    "gateway": _gateway,
    "inference": _inference,
    "reward": _reward,
    "learner": _learner,
    "weight_sync": _weight_sync,
    "sandbox": _tools,
    "tools": _tools,
    "cli": _cli,
}
