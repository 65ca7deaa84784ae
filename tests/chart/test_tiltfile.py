"""The Tiltfile, evaluated by Starlark with built-ins that record their calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import helm_python
import pytest
import starlark
import yaml

from tailrace.chat import Renderer
from tailrace.config import RunConfig
from tailrace_gateway.adapters.model_calls import model_call_routes
from tailrace_gateway.core.calls import ModelCalls
from tests.chart.conftest import CHART, ROOT, Render, container_of, merged, objects_in, workloads

# A built-in of Python takes no function.
NAMES_WORKLOADS = """
def workload_to_resource_function(name):
    job = struct(name="tailrace-run-1a2b3c4d", kind="Job")
    resource_names(name(job), name(struct(name="tailrace-agents", kind="Deployment")))
"""


class FakeTilt:
    """Records the calls of Tilt's built-ins."""

    def __init__(
        self,
        settings: dict[str, Any],
        files: tuple[str, ...] = (),
        subcommand: str = "up",
        build_arguments: str = "",
        values: dict[str, Any] | None = None,
    ) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        module = starlark.Module()
        for name in (
            "docker_build", "k8s_yaml", "helm", "k8s_resource", "local_resource", "port_forward",
            "link", "sync", "fall_back_on", "run", "allow_k8s_contexts", "define_string", "define_bool",
            "watch_file", "resource_names", "default_registry", "ci_settings",
        ):  # fmt: skip
            module.add_callable(name, self._recorder(name))
        module.add_callable("parse", lambda: settings)
        module.add_callable("exists", lambda path: path in files)
        module.add_callable("read_yaml", lambda _path, default: values or default)
        module.add_callable("k8s_namespace", lambda: "team")
        module.add_callable("local", self._runs(build_arguments))
        module["tilt_subcommand"] = subcommand
        module["TRIGGER_MODE_MANUAL"] = "manual"
        source = (ROOT / "Tiltfile").read_text()
        for module_name in ("config.", "os.path."):  # no methods in this Starlark
            source = source.replace(module_name, "")
        dialect = starlark.Dialect.extended()
        dialect.enable_top_level_stmt = True
        parsed = starlark.parse("Tiltfile", NAMES_WORKLOADS + source, dialect)
        extensions = [starlark.LibraryExtension.Print, starlark.LibraryExtension.StructType]
        starlark.eval(module, parsed, starlark.Globals.extended_by(extensions))

    def _recorder(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return [name, *arguments, *([named] if named else [])]

        return call

    def _runs(self, answer: str) -> Any:
        def call(command: str, **named: Any) -> str:
            self.calls.append(("local", (command,), named))
            return answer

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


@pytest.fixture(scope="module")
def tilt() -> FakeTilt:
    return FakeTilt({})


def test_every_image_of_the_chart_is_built_from_a_target_that_is_there(
    tilt: FakeTilt, render: Render
) -> None:
    stages = [
        line.split()[-1]
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("FROM ")
    ]
    built = {arguments[0]: named["target"] for arguments, named in tilt.of("docker_build")}
    assert set(built.values()) <= set(stages)
    images = {
        container["image"].partition(":")[0]
        for each in workloads(render())
        for container in (each["spec"].get("template", each)["spec"]["containers"])
    }
    assert {image for image in images if image.startswith("tailrace-")} == set(built)


def test_live_update_puts_the_packages_where_the_image_has_them(tilt: FakeTilt) -> None:
    for _, named in tilt.of("docker_build"):
        synced = [step[1:] for step in named["live_update"] if step[0] == "sync"]
        assert ["shared", "/opt/tailrace/src"] in synced
        assert ["services", "/opt/tailrace/src"] in synced
        assert named["live_update"][0][0] == "fall_back_on"
        for source, _ in synced:
            assert (ROOT / source).is_dir()


def test_a_container_runs_what_its_image_starts(tilt: FakeTilt) -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    for _, named in tilt.of("docker_build"):
        stage = next(
            each for each in stages if each.partition("\n")[0].endswith(f" AS {named['target']}")
        )
        (started,) = re.findall(r"^ENTRYPOINT (.+)$", stage, re.MULTILINE)
        command = re.search(r'^ *(python .+) "\$@"', named["entrypoint"][2], re.MULTILINE)
        assert command is not None
        assert command[1].split() == json.loads(started)


def test_a_container_ends_as_its_service_does_when_its_pod_is_stopped(
    tilt: FakeTilt, tmp_path: Path
) -> None:
    _, named = tilt.of("docker_build")[0]
    script = re.sub(r"python -m [\w. ]+\w", 'sh "$0.service"', named["entrypoint"][2]).replace(
        "/tmp", str(tmp_path)
    )
    service = tmp_path / "sh.service"
    service.write_text("trap 'exit 0' TERM\necho runs\nwhile :; do sleep 0.05; done\n")
    container = subprocess.Popen(
        ["sh", "-c", script, str(tmp_path / "sh")], stdout=subprocess.PIPE, text=True
    )
    assert container.stdout is not None
    assert container.stdout.readline() == "runs\n"
    container.terminate()
    assert container.wait(timeout=120) == 0


def test_the_chart_is_installed_with_the_cpu_values(tilt: FakeTilt) -> None:
    ((arguments, named),) = tilt.of("helm")
    assert ROOT / arguments[0] == CHART
    assert "defaults.writableRoot=true" in named["set"]
    (values,) = named["values"]
    assert yaml.safe_load((ROOT / values).read_text())["experiment"]["exp_name"] == "demo"


def test_the_built_images_are_those_of_the_pods_whatever_registry_the_values_name(
    chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    tilt = FakeTilt({"experiment": "mine.yaml"}, values=values["node-8gpu"])
    built = {arguments[0] for arguments, _ in tilt.of("docker_build")}
    ((_, named),) = tilt.of("helm")
    digests = {"image": {"digests": {"agents": f"sha256:{'0' * 64}"}}}
    given = merged(values["node-8gpu"], digests, *map(helm_python.parse_set_string, named["set"]))
    objects = objects_in(chart.render(given, name="tailrace", namespace="team"))
    images = {container_of(each)["image"].rpartition(":")[0] for each in workloads(objects)}
    assert {image for image in images if "tailrace" in image} <= built


def test_the_objects_go_to_the_namespace_of_the_context(tilt: FakeTilt) -> None:
    ((_, named),) = tilt.of("helm")
    assert named["namespace"] == "team"


def test_images_are_built_with_the_arguments_of_make_images() -> None:
    chosen = FakeTilt(
        {"base": "mine:1"}, build_arguments="BASE=mine:1\nPIP_INDEX_URL=http://a/?b=c\n\n"
    )
    ((command,), named) = chosen.of("local")[0]
    assert (command, named["env"]) == ("images/build.sh --arguments", {"BASE": "mine:1"})
    for _, build in chosen.of("docker_build"):
        assert build["build_args"] == {"BASE": "mine:1", "PIP_INDEX_URL": "http://a/?b=c"}


def test_the_arguments_of_a_build_are_one_a_line(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho noise of docker\n")
    docker.chmod(0o755)
    environment = {
        **os.environ,
        "DOCKER": str(docker),
        "BASE_GPU": "cuda:1",
        "PIP_INDEX_URL": "http://a/b",
    }
    environment.pop("BASE", None)
    printed = subprocess.run(
        [ROOT / "images/build.sh", "--arguments"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert {"BASE_GPU=cuda:1", "PIP_INDEX_URL=http://a/b"} <= set(printed.splitlines())
    assert "noise" not in printed


def readiness(tilt: FakeTilt) -> dict[str, str]:
    return {arguments[0]: named["pod_readiness"] for arguments, named in tilt.of("k8s_resource")}


def test_ci_waits_for_the_run_alone_since_that_stops_the_others(tilt: FakeTilt) -> None:
    in_ci = readiness(FakeTilt({}, subcommand="ci"))
    assert in_ci.pop("tailrace-run") == "succeeded"
    assert set(in_ci.values()) == {"ignore"}
    in_up = readiness(tilt)
    assert in_up.pop("tailrace-run") == "succeeded"
    assert set(in_up.values()) == {"wait"}


def test_a_crash_loop_ends_ci_with_the_name_of_the_pod(tmp_path: Path) -> None:
    ((name,), named), *others = [
        each for each in FakeTilt({}, subcommand="ci").of("local_resource") if "serve_cmd" in each[1]
    ]
    assert (name, others) == ("crash loops", [])
    table = "tailrace-agents-5d9c-x2x7z   1/1   Running            2 (9s ago)    2m\n"
    table += "tailrace-learner-0           0/1   {}   {}   2m\n"
    answers = ["", table.format("Error", "1"), table.format("CrashLoopBackOff", "1 (3s ago)")]
    answers += [table.format("Running", "2 (1s ago)"), table.format("CrashLoopBackOff", "2 (5s ago)")]
    for number, answer in enumerate(answers):
        (tmp_path / f"answer{number}").write_text(answer)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        'cd "$(dirname "$0")"; echo "$@" >>asked; cat "answer$(($(grep -c . asked) - 1))"\n'
    )
    kubectl.chmod(0o755)
    command = [each.replace("sleep 5", "sleep 0.01") for each in named["serve_cmd"]]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    (line,) = ended.stdout.splitlines()
    assert line.startswith("tailrace-learner-0 is in a crash loop after 2 restarts")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(answers)
    assert "app.kubernetes.io/instance=tailrace" in asked[0]


def test_up_shows_a_crash_loop_as_the_pod_that_it_waits_for(tilt: FakeTilt) -> None:
    assert [named for _, named in tilt.of("local_resource") if "serve_cmd" in named] == []


def test_each_workload_is_a_resource_with_links(tilt: FakeTilt, render: Render) -> None:
    resources = {arguments[0]: named for arguments, named in tilt.of("k8s_resource")}
    for each in workloads(render()):
        name = each["metadata"]["name"].replace("demo-", "tailrace-", 1)
        if each["kind"] == "Job":
            name = name.rpartition("-")[0]
        if each["kind"] != "Pod":
            assert name in resources
            assert resources[name]["labels"]
    assert resources["tailrace-agents"]["links"]
    ports = [forward[1] for named in resources.values() for forward in named["port_forwards"]]
    assert len(ports) == len(set(ports)), "two resources on one port"


def test_the_link_to_the_gateway_needs_no_key() -> None:
    resources = FakeTilt({"gateway": True}).of("k8s_resource")
    (links,) = [named["links"] for arguments, named in resources if arguments[0] == "tailrace-gateway"]
    (path,) = [urlsplit(link[1]).path for link in links if link[2] == "gateway"]
    calls, renderer = cast(ModelCalls, None), cast(Renderer, SimpleNamespace(token_text=None))
    routes = model_call_routes(calls, renderer, RunConfig(exp_name="demo"))
    assert [route.path for route in routes if route.is_open] == [path]


def test_the_job_of_a_run_has_one_name_whatever_it_runs(tilt: FakeTilt) -> None:
    assert tilt.of("resource_names") == [(("tailrace-run", "tailrace-agents"), {})]


def buttons_of(tilt: FakeTilt) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    return {each[0][0]: each for each in tilt.of("local_resource")}


def test_buttons_wait_for_a_click(tilt: FakeTilt) -> None:
    buttons = buttons_of(tilt)
    assert {"kill agents", "tests", "submit experiment", "test an episode"} <= set(buttons)
    for _, named in buttons.values():
        assert (named["trigger_mode"], named["auto_init"]) == ("manual", False)


def test_a_submitted_experiment_gets_a_name_of_its_own(tilt: FakeTilt, tmp_path: Path) -> None:
    (_, command), _ = buttons_of(tilt)["submit experiment"]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    ((written,), _) = tilt.of("watch_file")[0]
    name = yaml.safe_load((tmp_path / written).read_text())["experiment"]["exp_name"]
    assert re.fullmatch(r"run-\d{8}-\d{6}", name)
    assert FakeTilt({}, files=(written,)).of("helm")[0][1]["values"][-1] == written


def test_the_test_of_helm_lies_where_tilt_leaves_it_out() -> None:
    tests = [path for path in CHART.rglob("*.yaml") if "helm.sh/hook: test" in path.read_text()]
    assert [path.parent.name for path in tests] == ["tests"]


def test_what_the_values_ask_for_is_built_and_shown() -> None:
    values = {
        "sandbox": {"replicas": 2},
        "autoscaling": {"enabled": True},
        "gateway": {"enabled": True},
        "inference": {"pools": {"wide": {"image": "inference-vllm"}, "default": None}},
    }
    tilt = FakeTilt({"experiment": "mine.yaml"}, values=values)
    images = {named["target"] for _, named in tilt.of("docker_build")}
    assert {"sandbox", "autoscaler", "gateway", "inference-vllm"} < images
    assert "inference-torch" not in images
    shown = {arguments[0] for arguments, _ in tilt.of("k8s_resource")}
    assert {"tailrace-sandbox", "tailrace-autoscaler", "tailrace-inference-wide"} < shown
    assert "tailrace-inference-default" not in shown
    assert "kill inference-wide" in buttons_of(tilt)


def test_the_clusters_grafana_is_forwarded_and_gets_the_dashboards(
    chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    tilt = FakeTilt({"grafana": "monitoring/kube-grafana"})
    (serves,) = [
        named["serve_cmd"]
        for arguments, named in tilt.of("local_resource")
        if arguments == ("grafana",)
    ]
    assert serves == "kubectl port-forward --namespace monitoring service/kube-grafana 3000:80"
    ((_, named),) = tilt.of("helm")
    given = merged(values["laptop-cpu"], *map(helm_python.parse_set_string, named["set"]))
    objects = objects_in(chart.render(given, name="tailrace", namespace="team"))
    assert ("ConfigMap", "tailrace-dashboard-run") in objects
    assert ("PodMonitor", "tailrace-services") in objects
    agents = objects["NetworkPolicy", "tailrace-agents"]["spec"]["ingress"]
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert {"namespaceSelector": prometheus} in [peer for rule in agents for peer in rule["from"]]


def test_servers_that_the_values_bring_are_no_resources() -> None:
    """Tilt refuses a resource without an object."""
    tilt = FakeTilt(
        {"experiment": "mine.yaml"}, values={"nats": {"external": {"url": "nats://n:4222"}}}
    )
    shown = {arguments[0]: named for arguments, named in tilt.of("k8s_resource")}
    assert "tailrace-nats" not in shown
    assert shown["tailrace-agents"]["resource_deps"] == ["tailrace-redis"]
    both = FakeTilt({"experiment": "mine.yaml"}, values={"servers": {"release": "shared"}})
    shown = {arguments[0]: named for arguments, named in both.of("k8s_resource")}
    assert not {"tailrace-nats", "tailrace-redis"} & set(shown)
    assert shown["tailrace-agents"]["links"], "its metrics"


def test_settings_choose_values_context_and_gateway() -> None:
    chosen = FakeTilt({"experiment": "mine.yaml", "context": "team", "gateway": True})
    assert chosen.of("allow_k8s_contexts") == [(("team",), {})]
    assert chosen.of("helm")[0][1]["values"] == ["mine.yaml"]
    assert "gateway.enabled=true" in chosen.of("helm")[0][1]["set"]
    assert "tailrace-gateway" in {arguments[0] for arguments, _ in chosen.of("docker_build")}
    assert not FakeTilt({}).of("allow_k8s_contexts")
    assert FakeTilt({"registry": "localhost:5000"}).of("default_registry") == [
        (("localhost:5000",), {})
    ]
