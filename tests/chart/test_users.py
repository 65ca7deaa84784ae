"""Users of NATS and Redis in the rendered configuration, and servers of others."""

from __future__ import annotations

import json
import re

from tests.chart.conftest import (
    Render,
    container_of,
    pod_of,
)

# NATS and Redis users


def test_nats_has_a_user_for_each_service_with_its_subjects_alone(render: Render) -> None:
    config = json.loads(render()["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    users = {each["user"]: each for each in config["authorization"]["users"]}
    assert set(users) >= {
        "scheduler",
        "agents",
        "gateway",
        "inference",
        "learner",
        "weight_sync",
        "cli",
    }
    assert len({each["password"] for each in users.values()}) == len(users)
    assert "demo.scheduler.>" in users["scheduler"]["permissions"]["subscribe"]["allow"]
    assert "demo.scheduler.>" not in users["agents"]["permissions"]["subscribe"]["allow"]
    assert users["sandbox"]["permissions"]["publish"]["allow"] == ["$SYS._UNUSED"]
    assert "@RUN@" not in json.dumps(config)


def test_the_users_are_those_of_the_services_secrets(render: Render) -> None:
    objects = render()
    config = json.loads(objects["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    for user in config["authorization"]["users"]:
        secret = objects["Secret", f"demo-{user['user'].replace('_', '-')}"]
        assert secret["stringData"]["nats-password"] == user["password"]


def test_redis_has_no_default_user_and_only_hashes_of_passwords(render: Render) -> None:
    objects = render()
    acl = objects["Secret", "demo-redis-config"]["stringData"]["users.acl"]
    # Servers before the mend of valkey-io/valkey#3983 read their log with the rights of `default`.
    assert acl.startswith("user default off resetpass ~* &* +@all\n")
    assert re.search(
        r"^user sandbox on #[0-9a-f]{64} resetkeys resetchannels -@all ~\{demo\}:blob:\* ", acl, re.M
    )
    assert objects["Secret", "demo-learner"]["stringData"]["redis-password"] not in acl
    assert "+@all" not in acl.partition("\n")[2]


def test_standing_servers_know_the_users_of_every_run(render: Render) -> None:
    objects = render("laptop-cpu", {"mode": "standing", "standing": {"runs": ["one", "two"]}})
    config = json.loads(objects["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    agents = next(each for each in config["authorization"]["users"] if each["user"] == "agents")
    allowed = agents["permissions"]["publish"]["allow"]
    assert {"one.scheduler.lease", "two.scheduler.lease"} <= set(allowed)
    acl = objects["Secret", "demo-redis-config"]["stringData"]["users.acl"]
    agents = next(line for line in acl.splitlines() if line.startswith("user agents "))
    assert {"~{one}:group:*", "~{two}:group:*", "%R~{two}:model_card"} <= set(agents.split())
    assert {name for kind, name in objects if kind == "StatefulSet"} == {"demo-nats", "demo-redis"}


def test_standing_servers_without_names_serve_any_run(render: Render) -> None:
    objects = render("laptop-cpu", {"mode": "standing"})
    config = json.loads(objects["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    users = {each["user"]: each["permissions"] for each in config["authorization"]["users"]}
    assert "*.scheduler.lease" in users["agents"]["publish"]["allow"]
    assert "$JS.API.CONSUMER.MSG.NEXT.*.>" in users["agents"]["publish"]["allow"]
    assert "*.scheduler.>" not in users["agents"]["subscribe"]["allow"]
    assert ">" not in [right for each in users.values() for right in each["publish"]["allow"]]
    acl = objects["Secret", "demo-redis-config"]["stringData"]["users.acl"]
    agents = next(line for line in acl.splitlines() if line.startswith("user agents "))
    assert {"~{*}:group:*", "%R~{*}:model_card"} <= set(agents.split())
    assert "@RUN@" not in acl + json.dumps(config)


def test_foreign_tool_workers_may_not_take_the_sandboxs_names(render: Render) -> None:
    for change, run in (({}, "demo"), ({"mode": "standing"}, "*")):
        secret = render("laptop-cpu", change)["Secret", "demo-nats-config"]
        config = json.loads(secret["stringData"]["nats.conf"])
        tools = next(each for each in config["authorization"]["users"] if each["user"] == "tools")
        assert f"{run}.tool.python" in tools["permissions"]["subscribe"]["deny"]


def test_a_run_on_standing_servers_brings_none(render: Render) -> None:
    objects = render("laptop-cpu", {"servers": {"release": "shared"}})
    assert ("StatefulSet", "demo-nats") not in objects
    assert not [name for kind, name in objects if kind == "Secret"]
    agents = objects["Deployment", "demo-agents"]
    env = {each["name"]: each.get("value") for each in container_of(agents)["env"]}
    assert env["TAILRACE_NATS_URL"] == "nats://shared-nats:4222"
    volumes = {each["name"]: each for each in pod_of(agents)["volumes"]}
    assert volumes["credentials"]["secret"]["secretName"] == "shared-agents"


def test_external_servers_replace_ours(render: Render) -> None:
    objects = render(
        "laptop-cpu",
        {
            "nats": {"external": {"url": "tls://n:4222"}},
            "redis": {"external": {"url": "rediss://r:6379/0"}},
        },
    )
    assert {name for kind, name in objects if kind == "StatefulSet"} == {
        "demo-learner",
        "demo-inference-default",
    }
    env = {
        each["name"]: each.get("value")
        for each in container_of(objects["Deployment", "demo-agents"])["env"]
    }
    assert env["TAILRACE_NATS_URL"] == "tls://n:4222"
    assert env["TAILRACE_REDIS_URL"] == "rediss://r:6379/0"
