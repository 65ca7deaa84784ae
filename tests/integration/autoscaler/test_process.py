"""The autoscaler's process against NATS and a fake API server: up, down, outages, modes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kubernetes import client

from tailrace.bus import Bus
from tailrace.clock import SystemClock
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Args
from tailrace_autoscaler import __main__ as process
from tailrace_autoscaler.adapters.kubernetes_api import KubernetesWorkloads
from tailrace_autoscaler.config import AutoscalerConfig, ScalingTarget
from tailrace_autoscaler.core.signals import Signals
from tailrace_autoscaler.handlers import Autoscaler
from tailrace_cli.commands import follow
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus, ServerStatus
from tests.world.samples import sample
from tests.world.serving import eventually, serving

TARGET = {"kind": "Deployment", "name": "demo-agents"}
SCALED_OBJECT = "/apis/keda.sh/v1alpha1/namespaces/team/scaledobjects/demo-agents"


class FakeKubernetesApi:
    """Answers `/scale` of workloads as an API server does; `is_down` answers 503."""

    def __init__(self) -> None:
        self.replicas = {
            "apps/deployments/demo-agents": 1,
            "apps/statefulsets/demo-inference-a": 1,
            "leaderworkerset.x-k8s.io/leaderworkersets/demo-inference-b": 1,
        }
        self.finalizing = 2  # requests until KEDA has let the ScaledObject go
        self.is_down = False
        self.num_pods = 0  # of each workload
        self.patches: list[tuple[str, int]] = []
        self.num_requests = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                content = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(json.loads(content)["spec"]["replicas"])

            def do_DELETE(self) -> None:
                fake.num_requests += 1
                found = fake.finalizing if self.path.partition("?")[0] == SCALED_OBJECT else 0
                fake.finalizing -= bool(found and not fake.is_down)
                self._send(503 if fake.is_down else 200 if found else 404, {})

            def _answer(self, replicas: int | None) -> None:
                fake.num_requests += 1
                path = self.path.partition("?")[0].strip("/")
                apis, group, version, _, namespace, *named, scale = path.split("/")
                key = "/".join([group, *named])
                if fake.is_down:
                    return self._send(503, {"message": "away"})
                place = (apis, version, namespace, scale)
                if key not in fake.replicas or place != ("apis", "v1", "team", "scale"):
                    return self._send(404, {"message": "not found"})
                if replicas is not None:
                    fake.replicas[key] = replicas
                    fake.patches.append((key, replicas))
                found = {
                    "spec": {"replicas": fake.replicas[key]},
                    "status": {"replicas": fake.num_pods},
                }
                return self._send(200, {"kind": "Scale", "apiVersion": "autoscaling/v1"} | found)

            def _send(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def client(self) -> Any:
        configuration = client.Configuration(host=self.url)
        configuration.retries = False
        return client.ApiClient(configuration)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetesApi]:
    fake = FakeKubernetesApi()
    yield fake
    await asyncio.to_thread(fake.close)


def status(episodes: int, **changes: Any) -> RunStatus:
    values: dict[str, Any] = dict.fromkeys(RunStatus.__struct_fields__[:14], 0)
    values |= dict.fromkeys(
        ("reward_mean", "success_rate", "eval_success_rate", "staleness_mean", "tokens_per_s", "eta_s")
    )
    values |= {"num_episodes_running": episodes, "phase": "training"}
    return RunStatus(**(values | changes))


def server(busy_s: float, idle_s: float, server_id: str = "demo-inference-a-0") -> ServerStatus:
    return ServerStatus(server_id, "ready", "", "", "h", 1, 1, 1, 1, 0, 0, idle_s, busy_s, 0.0)


def make_service(run: str, endpoints: Endpoints, **section: Any) -> Any:
    experiment = {"exp_name": run, "autoscaler": section}
    return process.build(Args("run.yaml", "a", experiment, RunConfig(exp_name=run), endpoints))


def wanted(target: str) -> float:
    return sample("tailrace_autoscaler_desired_replicas", target=target)


async def held(reason: str, num_looks: int) -> None:
    """Return after so many more looks that changed nothing for this reason."""

    def count() -> float:
        return sample("tailrace_autoscaler_held_total", reason=reason)

    before = count()
    await eventually(lambda: count() >= before + num_looks)


QUICK: dict[str, Any] = {"interval_s": 0.05, "up_after_s": 0.1, "down_after_s": 0.3, "mode": "builtin"}


async def say(bus: Bus, current: Callable[[], RunStatus]) -> None:
    while True:
        await bus.publish(subjects.run_status(bus.run), current())
        await asyncio.sleep(0.05)


async def test_replicas_follow_the_load_up_and_down_and_hold_in_an_outage(
    run_bus: Bus, endpoints: Endpoints, api: FakeKubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "in_cluster", lambda: (api.client(), "team"))
    agents = {**TARGET, "min_replicas": 1, "max_replicas": 4, "episodes_per_replica": 10}
    service = make_service(run_bus.run, endpoints, targets={"agents": agents}, stale_s=0.5, **QUICK)
    load, key = 100, "apps/deployments/demo-agents"
    telling = asyncio.create_task(say(run_bus, lambda: status(load)))
    async with serving(service):
        await eventually(lambda: api.replicas[key] == 4)  # its bound, though 10 were wanted
        api.is_down = True
        load = 5
        await held("api", 10)  # looks: longer than `down_after_s`
        assert len(api.patches) == 1
        api.is_down = False
        await eventually(lambda: api.replicas[key] == 1)
        telling.cancel()  # the run falls silent
        await held("status", 10)
    assert [count for _, count in api.patches] == [4, 1], "no flapping"


@pytest.mark.parametrize(("mode", "most"), [("metric", 2), ("keda", 3), ("hpa", 4)])
async def test_other_modes_ask_nothing_of_kubernetes(
    mode: str,
    most: int,
    run_bus: Bus,
    endpoints: Endpoints,
    api: FakeKubernetesApi,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "in_cluster", lambda: (api.client(), "team"))
    target = {**TARGET, "max_replicas": most, "episodes_per_replica": 1}
    service = make_service(
        run_bus.run, endpoints, **(QUICK | {"mode": mode}), targets={"agents": target}
    )
    telling = asyncio.create_task(say(run_bus, lambda: status(9)))
    async with serving(service):
        await eventually(lambda: wanted("agents") == most)
    telling.cancel()
    assert api.num_requests == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Deployment", "demo-agents"),
        ("StatefulSet", "demo-inference-a"),
        ("LeaderWorkerSet", "demo-inference-b"),
    ],
)
async def test_the_scale_of_each_kind_is_read_and_set(
    kind: str, name: str, api: FakeKubernetesApi
) -> None:
    workloads = KubernetesWorkloads(api.client(), "team")
    assert await workloads.replicas(kind, name) == 1
    await workloads.set_replicas(kind, name, 3)
    assert await workloads.replicas(kind, name) == 3
    assert await workloads.num_pods(kind, name) == 0
    assert [count for _, count in api.patches] == [3]


async def test_the_end_of_a_run_waits_until_keda_scales_no_more(
    api: FakeKubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "in_cluster", lambda: (api.client(), "team"))
    monkeypatch.setattr(follow, "_POLL_S", 0.01)
    seen: list[int] = []
    set_replicas = KubernetesWorkloads.set_replicas

    async def watched(self: KubernetesWorkloads, kind: str, name: str, replicas: int) -> None:
        seen.append(api.finalizing)
        await set_replicas(self, kind, name, replicas)

    monkeypatch.setattr(KubernetesWorkloads, "set_replicas", watched)
    api.is_down = True
    stopping = asyncio.create_task(
        follow.stop_workloads(["ScaledObject/demo-agents", "Deployment/demo-agents"])
    )
    await eventually(lambda: api.num_requests > 0)
    api.is_down = False
    await stopping
    assert seen == [0]
    assert api.patches == [("apps/deployments/demo-agents", 0)]


async def test_the_end_of_a_run_stops_the_servers_though_a_pod_never_ends(
    api: FakeKubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of a pod may be lost, and a workload may be gone."""
    monkeypatch.setattr(follow, "in_cluster", lambda: (api.client(), "team"))
    monkeypatch.setattr(follow, "_POLL_S", 0.001)
    monkeypatch.setattr(follow, "_STOP_WITHIN_S", 0.0)
    api.num_pods = 1
    names = ["Deployment/demo-gone", "Deployment/demo-agents", "-", "StatefulSet/demo-inference-a"]
    await follow.stop_workloads(names)
    assert [key for key, _ in api.patches] == [
        "apps/deployments/demo-agents",
        "apps/statefulsets/demo-inference-a",
    ]


async def test_a_run_whose_workloads_cannot_be_stopped_has_not_failed(
    api: FakeKubernetesApi,
    endpoints: Endpoints,
    bus: Bus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Job fails on exit codes 1 and 2 alone; after another one it starts again."""
    monkeypatch.setattr(follow, "in_cluster", lambda: (api.client(), "team"))
    monkeypatch.setattr(follow, "_POLL_S", 0.001)
    monkeypatch.setattr(follow, "_STOP_WITHIN_S", 0.0)
    monkeypatch.setattr(Endpoints, "from_env", lambda: endpoints)
    api.is_down = True
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps({"exp_name": bus.run, "scheduler": {"tags": ["t"]}}))
    arguments = ["--config", str(path), "--then-stop", "Deployment/demo-agents"]
    ending = asyncio.create_task(asyncio.to_thread(follow.main, arguments))
    while not ending.done():
        await bus.publish(subjects.run_status(bus.run), status(0, phase="finished"))
        await asyncio.sleep(0.02)
    assert await ending == 3
    assert "the workloads of the ended run are not stopped" in capsys.readouterr().err


async def test_dry_run_counts_and_sets_nothing(api: FakeKubernetesApi) -> None:
    clock, signals = SystemClock(), Signals(["agents"])
    target = ScalingTarget(**TARGET, max_replicas=3, episodes_per_replica=1)
    config = AutoscalerConfig(targets={"agents": target}, up_after_s=0, dry_run=True)

    async def waiting() -> int:
        return 2

    workloads = KubernetesWorkloads(api.client(), "team")
    autoscaler = Autoscaler(config, signals, waiting, workloads, clock)
    signals.on_status(status(5), clock.monotonic_s())
    await autoscaler.look()
    assert api.patches == []
    assert wanted("agents") == 3


def test_servers_belong_to_the_pool_whose_name_their_pod_ends_with() -> None:
    signals = Signals(["inference-a", "inference-a-b"])
    signals.on_status(status(1), 0.0)
    for pod in ("demo-inference-a-0", "demo-inference-a-1", "demo-inference-a-b-0"):
        signals.on_server(server(1, 1, pod), 0.0)
    assert signals.observe(0.0, 0).num_servers == {"inference-a": 2, "inference-a-b": 1}
    signals.on_server(server(1, 9, "demo-inference-a-b-0"), 5.0)
    signals.on_server(server(9, 1, "demo-inference-a-0"), 5.0)
    assert signals.observe(5.0, 0).busy_share == {"inference-a": 1.0, "inference-a-b": 0.0}


def test_busy_shares_are_those_since_the_last_look() -> None:
    signals = Signals(["inference-a", "agents"])
    signals.on_status(status(1), 0.0)
    signals.on_server(server(10, 10), 0.0)
    assert signals.observe(0.0, 0).busy_share == {"inference-a": None}
    signals.on_server(server(19, 11), 5.0)
    assert signals.observe(5.0, 0).busy_share == {"inference-a": 0.9}
    assert signals.observe(60.0, 0).busy_share == {"inference-a": None}, "the server has gone"
