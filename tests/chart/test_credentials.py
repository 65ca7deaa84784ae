"""Secrets stay over upgrades; what they say is taken by a real nats-server and Redis."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import helm_python
import pytest

from tailrace_cli.cluster.servers import MAX_MESSAGE_BYTES, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tests.chart.conftest import ROOT, Objects, Render, merged, objects_in


class FakeApiWithSecrets:
    """Answers Helm's `lookup` of Secrets as an API server does."""

    def __init__(self, secrets: dict[str, dict[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                name = path.rpartition("/")[2]
                if path == "/api/v1":
                    kinds = [
                        {"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}
                    ]
                    body = {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds}
                elif path == "/version":
                    body = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
                elif path == "/api":
                    body = {"kind": "APIVersions", "versions": ["v1"]}
                elif path == "/apis":
                    body = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
                elif "/namespaces/team/secrets/" in path and name in secrets:
                    body = secrets[name]
                else:
                    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                            "reason": "NotFound", "message": f"{name} not found"}  # fmt: skip
                content = json.dumps(body).encode()
                self.send_response(404 if body.get("code") == 404 else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def stored(objects: Objects) -> dict[str, dict[str, Any]]:
    """Rendered Secrets as the API server keeps them."""
    return {
        name: {
            **each,
            "data": each.get("data", {})
            | {
                key: base64.b64encode(text.encode()).decode()
                for key, text in each.get("stringData", {}).items()
            },
        }
        for (kind, name), each in objects.items()
        if kind == "Secret"
    }


@pytest.fixture
def upgrade(chart: helm_python.Chart, values: dict[str, Any]) -> Iterator[Any]:
    """Renders as an upgrade of a release whose Secrets are there."""
    servers: list[FakeApiWithSecrets] = []

    def upgraded(before: Objects, change: dict[str, Any]) -> Objects:
        api = FakeApiWithSecrets(stored(before))
        servers.append(api)
        config = f"""
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: {api.url}}}}}]
users: [{{name: u}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
        with helm_python.Config(kubeconfig_content=config, namespace="team") as helm:
            given = merged(values["laptop-cpu"], change)
            return objects_in(helm.render(chart, given, name="demo", namespace="team", is_upgrade=True))

    yield upgraded
    for api in servers:
        api.close()


def test_an_upgrade_keeps_every_password_and_certificate(
    upgrade: Any, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    tls = {"tls": {"enabled": True}}
    first = objects_in(chart.render(merged(values["laptop-cpu"], tls), name="demo", namespace="team"))
    second = upgrade(first, merged(tls, {"agents": {"replicas": 5}}))
    assert second["Deployment", "demo-agents"]["spec"]["replicas"] == 5
    before, after = stored(first), stored(second)
    for name in before:
        assert before[name]["data"] == after[name]["data"], name


def test_a_first_install_is_random(chart: helm_python.Chart, values: dict[str, Any]) -> None:
    made = [
        objects_in(chart.render(values["laptop-cpu"], name="demo", namespace="team"))[
            "Secret", "demo-agents"
        ]
        for _ in range(2)
    ]
    assert made[0]["stringData"] != made[1]["stringData"]


def test_a_lost_secret_alone_is_made_anew(upgrade: Any, render: Render) -> None:
    first = render()
    lost = {key: each for key, each in first.items() if key != ("Secret", "demo-reward")}
    before, after = stored(first), stored(upgrade(lost, {}))
    changed = {name for name in before if before[name]["data"] != after[name]["data"]}
    assert changed == {"demo-reward", "demo-nats-config", "demo-redis-config"}


def digests(objects: Objects) -> dict[str, str]:
    """What pods have of the passwords that they read at their start, by workload."""
    return {
        name: each["spec"]["template"]["metadata"]["annotations"]["checksum/passwords"]
        for (kind, name), each in objects.items()
        if kind in ("Deployment", "StatefulSet")
    }


def test_an_upgrade_starts_no_pod_anew_for_its_passwords(
    upgrade: Any, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    gateway = {"gateway": {"enabled": True}}
    given = merged(values["laptop-cpu"], gateway)
    first = objects_in(chart.render(given, name="demo", namespace="team"))
    assert digests(upgrade(first, gateway)) == digests(first)


def test_a_password_that_changes_starts_its_readers_anew(upgrade: Any, render: Render) -> None:
    """NATS and Valkey read their users at the start alone, and a service its own password."""
    first = render()
    lost = {key: each for key, each in first.items() if key != ("Secret", "demo-reward")}
    before, after = digests(first), digests(upgrade(lost, {}))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"demo-reward", "demo-nats", "demo-redis"}


def test_another_seed_starts_every_pod_anew(render: Render) -> None:
    before, after = digests(render()), digests(render("laptop-cpu", {"credentials": {"seed": "new"}}))
    assert [name for name in before if before[name] == after[name]] == []


def test_nats_server_takes_the_configuration(tmp_path: Path, render: Render) -> None:
    text = render()["Secret", "demo-nats-config"]["stringData"]["nats.conf"]
    assert json.loads(text)["max_payload"] == MAX_MESSAGE_BYTES
    (tmp_path / "nats.conf").write_text(text)
    server = ROOT / ".venv" / "bin" / "nats-server"
    result = subprocess.run(
        [server, "-t", "-c", tmp_path / "nats.conf"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


REDIS = """
import json, redis, socket, subprocess, sys, time
folder, server = sys.argv[1:]
path = f"{folder}/s"
SERVICES = ("scheduler", "learner")
ADMIN = (("CONFIG", "GET", "*"), ("FLUSHALL",), ("ACL", "LIST"), ("KEYS", "*"))
log = open(f"{folder}/log", "wb")
process = subprocess.Popen(
    [server, f"{folder}/redis.conf", "--unixsocket", path, "--port", "0"], stdout=log, stderr=log
)
try:
    for _ in range(200):
        try:
            socket.socket(socket.AF_UNIX).connect(path)
            break
        except OSError:
            time.sleep(0.05)
    passwords = json.load(open(f"{folder}/passwords.json"))

    def may(user, *command):
        try:
            client = redis.Redis(unix_socket_path=path, username=user, password=passwords[user])
            client.execute_command(*command)
        except redis.exceptions.NoPermissionError:
            return False
        except redis.exceptions.ResponseError as error:
            return "NOPERM" not in str(error)
        return True

    def refusal(**login):
        try:
            return str(redis.Redis(unix_socket_path=path, **login).get("x"))
        except redis.exceptions.AuthenticationError as error:
            return type(error).__name__

    key, other = "{demo}:counters", "{other}:counters"
    found = {
        "default": [refusal(), refusal(username="default", password=""), refusal(password="x")],
        "own": [may(u, "HGETALL", key) for u in SERVICES],
        "others": [may(u, "HGETALL", other) for u in SERVICES],
        "inference": [may("inference", "GET", "{demo}:model_card"), may("inference", "GET", key)],
        "sandbox": [may("sandbox", "GET", "{demo}:blob:x"), may("sandbox", "GET", "{demo}:model_card")],
        "admin": [may(u, *c) for u in passwords for c in ADMIN],
        "probe": redis.Redis(unix_socket_path=path, username="probe", password="x").ping(),
    }
    print(json.dumps(found))
finally:
    process.kill()
"""


def test_redis_gives_each_service_its_keys_and_nobody_the_server(
    tmp_path: Path, render: Render
) -> None:
    objects = render()
    files = objects["Secret", "demo-redis-config"]["stringData"]
    (tmp_path / "users.acl").write_text(files["users.acl"])
    config = (
        files["redis.conf"].replace("/etc/redis", str(tmp_path)).replace("dir /data", f"dir {tmp_path}")
    )
    (tmp_path / "redis.conf").write_text(config)
    nats = json.loads(objects["Secret", "demo-nats-config"]["stringData"]["nats.conf"])
    passwords = {
        each["user"]: objects["Secret", f"demo-{each['user'].replace('_', '-')}"]["stringData"][
            "redis-password"
        ]
        for each in nats["authorization"]["users"]
    }
    (tmp_path / "passwords.json").write_text(json.dumps(passwords))
    server = redis_server_binary(ClusterConfig())
    result = subprocess.run(
        [sys.executable, "-c", REDIS, str(tmp_path), str(server)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["default"] == ["AuthenticationError"] * 3
    assert found["own"] == [True] * 2
    assert found["others"] == [False] * 2
    assert found["inference"] == [True, False]
    assert found["sandbox"] == [True, False]
    assert not any(found["admin"])
    assert found["probe"] is True
