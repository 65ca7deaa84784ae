"""Rights of each service's users: its own subjects in NATS, its own keys and commands in Redis.

Inboxes are per user, so nobody can listen to another's replies. Answers to requests need no entry: the
server allows a reply to whoever was asked (`allow_responses`); token streams outlive that and have one.
"""

from collections.abc import Sequence
from typing import Any

from tailrace.store import scripts
from tailrace.store.scripts import Script
from tailrace_protos import subjects

SERVICE_USERS = (*subjects.SERVICES, "tools", "cli")  # "tools": tool workers outside the services

# nats-server remembers every request for so long. The caller of a tool that takes longer asks again.
_ANSWERS = {"max": 16, "expires": "10m"}


def nats_permissions(user: str, run: str, tool_names: Sequence[str] = ()) -> dict[str, Any]:
    """nats-server's `permissions` block of one service user.

    `tool_names`: all that the user `tools` may serve; empty: every name but those of the sandbox.
    """
    publish, subscribe = _RIGHTS[user](run) if user in _RIGHTS else _answers(user, run)
    if user == "tools" and tool_names:
        subscribe = [*_served(tool_names, run), *_served(tool_names), subjects.tool_worker("*")]
    return {
        "publish": {"allow": publish or ["$SYS._UNUSED"]},
        "subscribe": {"allow": [f"_INBOX.{user}.>", "$SRV.>", *subscribe], **_denied(user, run)},
        "allow_responses": _ANSWERS,
    }


SANDBOX_TOOLS = ("python", "shell", "python_session")


def _denied(user: str, run: str) -> dict[str, list[str]]:
    """Subjects that foreign tool workers may not take from the sandbox: its names, and its own.

    nats-server lets a user with `a.*` listen to `a.>`; only a denied subject keeps `a.b.c` from it.
    """
    if user != "tools":
        return {}
    return {"deny": [*_served(SANDBOX_TOOLS, run), subjects.tool_worker("*.>")]}


def _served(names: Sequence[str], run: str = "") -> list[str]:
    """Subjects of tools with these names, for one run or for every run."""
    return [subjects.tool(f"{name}{rest}", run) for name in names for rest in ("", ".>")]


def _pulled(name: str) -> list[str]:
    """JetStream's API for one stream whose consumers are there: pull and acknowledge."""
    return [
        f"$JS.API.STREAM.INFO.{name}",
        f"$JS.API.CONSUMER.INFO.{name}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{name}.>",
        f"$JS.ACK.{name}.>",
    ]


def _read(name: str) -> list[str]:
    """JetStream's API for the stream of a bucket that is there: list and read its keys."""
    return [
        f"$JS.API.STREAM.INFO.{name}",
        f"$JS.API.DIRECT.GET.{name}",
        f"$JS.API.DIRECT.GET.{name}.>",
    ]


def _stream(name: str) -> list[str]:
    """JetStream's API for one stream: create, read, consume, acknowledge, delete."""
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
    publish = [right for stream in subjects.streams(run) for right in _stream(stream)]
    publish += ["$JS.API.INFO", f"{run}.episodes.*", f"{run}.dead.>", subjects.events(run)]
    publish += [subjects.run_status(run), subjects.inference_control(run, "*")]
    publish += [subjects.inference_probe(run, "*")]
    publish += [subjects.episodes_stopped(run), subjects.scheduler_began(run)]
    subscribe = [f"{run}.scheduler.>", subjects.activity(run), f"{run}.weight_sync.>", _registry(run)]
    return publish, subscribe


def _agents(run: str) -> Rights:
    publish = [*_pulled(subjects.episodes_stream(run)), f"{run}.episodes.*", f"{run}.dead.>"]
    publish += [subjects.lease(run), subjects.lease_report(run), subjects.activity(run)]
    publish += [subjects.score(run), subjects.generate(run, "*")]
    publish += [subjects.gateway_open(run), subjects.gateway_export(run), subjects.gateway_close(run)]
    publish += [*_any_tool(run), "$SRV.>"]
    return publish, [subjects.episodes_stopped(run), subjects.scheduler_began(run)]


def _gateway(run: str) -> Rights:
    publish = [subjects.lease(run), subjects.lease_report(run), subjects.activity(run)]
    publish += [subjects.generate(run, "*"), subjects.gateway_closed(run)]
    return publish, [f"{run}.gateway.>", subjects.scheduler_began(run)]


def _tools(run: str) -> Rights:
    """See also `_denied`."""
    return [], [subjects.tool(">"), subjects.tool(">", run), subjects.tool_worker("*")]


def _sandbox(run: str) -> Rights:
    return [], [*_served(SANDBOX_TOOLS, run), subjects.tool_worker("sandbox.*")]


def _any_tool(run: str) -> list[str]:
    """Rights of callers."""
    return [subjects.tool(">"), subjects.tool(">", run), subjects.tool_worker(">")]


def _inference(run: str) -> Rights:
    publish = [_registry(run), *_read(f"KV_{subjects.registry_bucket(run)}")]
    publish += [subjects.current_weights(run), subjects.weights_applied(run)]
    publish += [subjects.weight_route(run), subjects.weight_broadcast(run), subjects.activity(run)]
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


def _autoscaler(run: str) -> Rights:
    stream = subjects.episodes_stream(run)
    publish = [f"$JS.API.CONSUMER.INFO.{stream}.>", *_read(f"KV_{subjects.registry_bucket(run)}")]
    return publish, [subjects.run_status(run), _registry(run)]


def _cli(run: str) -> Rights:
    publish = ["$SRV.>", subjects.generate(run, "*"), *_any_tool(run)]
    publish += [f"$JS.API.STREAM.DELETE.{stream}" for stream in subjects.streams(run)]
    return publish, [subjects.run_status(run), subjects.events(run)]


_RIGHTS = {
    "scheduler": _scheduler,
    "agents": _agents,
    "gateway": _gateway,
    "inference": _inference,
    "reward": _reward,
    "learner": _learner,
    "weight_sync": _weight_sync,
    "sandbox": _sandbox,
    "tools": _tools,
    "cli": _cli,
    "autoscaler": _autoscaler,
}

# Redis: the scripts that a service runs, the commands that it sends itself, and the keys of these.
# A script needs its caller's rights; only the scheduler may load scripts.
_BLOBS = (f"~{subjects.redis_prefix('tools')}blob:*", "blob:*")  # of tools that no run owns, and of it
_REDIS_RIGHTS: dict[str, tuple[tuple[Script, ...], str, tuple[str, ...]]] = {
    "scheduler": (
        (
            scripts.RECORD_GROUP, scripts.BEGIN_GROUPS, scripts.SETTLE_MEMBERS, scripts.RAISE_ATTEMPT,
            scripts.ABANDON_GROUP, scripts.EMIT_EVENTS, scripts.READ_OUTBOX, scripts.ACK_OUTBOX,
            scripts.GROUP_IDS, scripts.FORGET_GROUP,
        ),
        "script|load get set hgetall hdel zrange zrem xread",
        ("%R model_card", "quarantine:*", "ended_lineage"),
    ),
    "agents": (
        (
            scripts.SETTLE_MEMBERS, scripts.ABANDON_GROUP, scripts.LOAD_JOURNAL, scripts.APPEND_JOURNAL,
            scripts.CLEAR_JOURNAL, scripts.OUTSIDE_EPISODE,
        ),
        "get set hgetall",
        ("%R model_card", "quarantine:*", *_BLOBS),
    ),
    "gateway": (
        (
            scripts.OPEN_SESSION, scripts.READ_SESSION, scripts.APPEND_SESSION, scripts.CLAIM_SESSION,
            scripts.UNCLAIM_SESSION, scripts.FINISH_SESSION, scripts.DELETE_SESSION,
            scripts.OUTSIDE_EPISODE,
        ),
        "get set hmget",
        ("%R model_card", "quarantine:*", "blob:*"),
    ),
    "learner": (
        (scripts.TAKE_READY, scripts.RELEASE_READY, scripts.REBASE_CREDIT, scripts.EMIT_EVENTS),
        "get set hgetall hmget hdel xread",
        ("model_card", "quarantine:*", "%R versions", "%R ended_lineage"),
    ),
    "weight_sync": (
        (scripts.ALLOCATE_VERSION, scripts.RECORD_VERSION, scripts.EMIT_EVENTS),
        "set hgetall",
        ("versions", "quarantine:*"),
    ),
    "inference": ((), "get set", ("%R model_card", "quarantine:*")),
    **dict.fromkeys(("sandbox", "tools"), ((), "get set", _BLOBS)),
    "cli": ((), "get set scan unlink", (*_BLOBS, "*")),  # deletes what a run leaves behind
}  # fmt: skip


def redis_rights(user: str, run: str) -> str:
    """Rules of one service's Redis user, as in an ACL file; a service without keys may only connect."""
    used, sent, named = _REDIS_RIGHTS.get(user, ((), "", ()))
    keys = {*named, *(key for script in used for key in script.keys), *([""] if used else [])}
    commands = {
        "ping",
        "client|setinfo",
        *sent.split(),
        *(one for each in used for one in each.commands),
    }
    if used:
        commands.add("evalsha")
    rules = [_key_rule(key, run) for key in sorted(keys)]
    return " ".join(("resetkeys resetchannels -@all", *rules, *(f"+{one}" for one in sorted(commands))))


def _key_rule(key: str, run: str) -> str:
    """Pattern of keys below the run's prefix; of keys elsewhere it is complete already."""
    if key.startswith("~"):
        return key
    access, _, name = key.rpartition(" ")
    return f"{access}~{subjects.redis_prefix(run)}{name}"
