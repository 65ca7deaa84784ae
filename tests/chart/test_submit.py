"""`tailrace submit`, `status`, `logs` and `stop` against an API server in memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.commands.submit import GivenExperiment, Wanted, install
from tailrace_cli.experiment import load
from tailrace_cli.submission import releases
from tailrace_cli.submission.cluster import Cluster, Pod
from tests.chart.api_server import FakeApiServer
from tests.chart.conftest import CHART, ROOT

EXAMPLE = ROOT / "examples" / "frozen_lake" / "experiment.yaml"
STANDING = {
    "mode": "standing",
    "credentials": {"seed": "s"},
    "image": {"tag": "9"},
    "tls": {"enabled": True},
}


class Team:
    """A namespace with a standing release, and the command line's way to it."""

    def __init__(self, api: FakeApiServer, folder: Path) -> None:
        self.api = api
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(api.kubeconfig("gpu", "other"))
        self.screen = io.StringIO()
        self.console = Console(file=self.screen, width=200)
        self.cluster = Cluster("gpu", "team", str(self.kubeconfig))

    def install(self, name: str, values: dict[str, object]) -> None:
        with helm_python.Config(kubeconfig_path=self.kubeconfig, namespace="team") as helm:
            helm.install(CHART, name, values)

    def submit(self, *overrides: str, path: Path = EXAMPLE, **wanted: object) -> str:
        source = GivenExperiment(load(path, overrides), path, overrides)
        options = Wanted(**({"standing": "shared"} | wanted))
        install(source, options, self.cluster, self.console)
        return self.said()

    def said(self) -> str:
        text = self.screen.getvalue()
        self.screen.truncate(0)
        self.screen.seek(0)
        return text


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    server = FakeApiServer("team")
    yield server
    server.close()


@pytest.fixture
def team(api: FakeApiServer, tmp_path: Path) -> Team:
    return Team(api, tmp_path)


def pod(component: str, **changes: object) -> dict[str, Any]:
    state = {"name": component, "ready": True, "restartCount": 2, "image": "i", "imageID": "i",
             "state": {"running": {}}}  # fmt: skip
    labels = {"app.kubernetes.io/instance": "one", "app.kubernetes.io/component": component}
    status = {"phase": "Running", "containerStatuses": [state | changes]}
    metadata = {"name": f"one-{component}-x", "labels": labels}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "status": status}


def test_runs_are_submitted_beside_each_other_and_removed_one_by_one(team: Team) -> None:
    team.install("shared", STANDING)
    said = team.submit("exp_name=one", "max_steps=7")
    assert "tailrace logs one run -f --context gpu --namespace team" in said
    team.submit("exp_name=Two_2")
    assert {"one-learner", "two-2-learner", "shared-nats"} <= team.api.names("StatefulSet")
    experiment = team.api.objects["team", "configmaps", "one-experiment"]["data"]["experiment.json"]
    assert yaml.safe_load(experiment)["max_steps"] == 7
    agents = team.api.objects["team", "deployments", "one-agents"]["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in agents["containers"][0]["env"]}
    assert env["TAILRACE_NATS_URL"] == "tls://shared-nats:4222", "TLS is the standing release's"
    assert agents["containers"][0]["image"] == "tailrace-agents:9", "so are the images"
    assert not [name for name in team.api.names("Secret") if name.startswith("one-")]
    releases.stop(team.cluster, "one", 30, team.console)
    assert "one: removed" in team.said()
    assert {"two-2-learner", "shared-nats"} <= team.api.names("StatefulSet")
    assert not [key for key in team.api.objects if key[2].startswith("one-")]
    forget = next(each for each in team.api.hooks if each["kind"] == "Job")
    container = forget["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["one"], "the servers forget the run, and its name is free"
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["TAILRACE_REDIS_URL"] == "rediss://shared-redis:6379/0"


def test_values_files_win_over_the_standing_release_and_modules_go_along(
    team: Team, tmp_path: Path
) -> None:
    team.install("shared", STANDING)
    (tmp_path / "experiment.yaml").write_text(EXAMPLE.read_text())
    (tmp_path / "my_reward.py").write_text("def score(): ...\n")
    values = tmp_path / "values.yaml"
    values.write_text("agents: {replicas: 3}\nimage: {tag: '10'}\n")
    team.submit("exp_name=one", path=tmp_path / "experiment.yaml", values=[str(values)])
    agents = team.api.objects["team", "deployments", "one-agents"]["spec"]
    assert agents["replicas"] == 3
    assert agents["template"]["spec"]["containers"][0]["image"] == "tailrace-agents:10"
    code = team.api.objects["team", "configmaps", "one-code"]["data"]
    assert code == {"my_reward.py": "def score(): ...\n"}


def test_a_run_that_needs_sandboxes_gets_them(team: Team, tmp_path: Path) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one", "cluster.num_sandboxes=2")
    assert team.api.objects["team", "deployments", "one-sandbox"]["spec"]["replicas"] == 2
    values = tmp_path / "values.yaml"
    values.write_text("sandbox: {replicas: 5}\n")
    team.submit("exp_name=two", "cluster.num_sandboxes=2", values=[str(values)])
    assert team.api.objects["team", "deployments", "two-sandbox"]["spec"]["replicas"] == 5


def refused(team: Team, *overrides: str, **wanted: object) -> str:
    before = dict(team.api.objects)
    with pytest.raises(ConfigError) as caught:
        team.submit(*overrides, **wanted)
    assert team.api.objects == before, "nothing is made"
    return str(caught.value)


def test_submissions_that_cannot_work_are_refused_before_anything_is_made(
    team: Team, tmp_path: Path
) -> None:
    assert "no standing release shared in namespace team (releases: none)" in refused(team)
    team.install("shared", STANDING | {"standing": {"runs": ["one", "two"]}})
    assert "serves the runs one, two alone" in refused(team, "exp_name=three")
    team.submit("exp_name=one")
    assert "the name is taken: release one" in refused(team, "exp_name=one")
    assert "the name is taken: release one" in refused(team, "exp_name=one", name="another")
    assert "is one run (mode job)" in refused(team, "exp_name=two", standing="one")
    assert "a letter first" in refused(team, "exp_name=two", name="7b")
    long = refused(team, "exp_name=two", name="x" * 41)
    assert "--name" in long
    values = tmp_path / "values.yaml"
    values.write_text("mode: job\n")
    assert "mode is set by tailrace submit" in refused(team, "exp_name=two", values=[str(values)])
    values.write_text("agent: {}\n")
    assert "agent" in refused(team, "exp_name=two", values=[str(values)])
    assert "cannot read" in refused(team, "exp_name=two", values=["nowhere.yaml"])


def test_paths_of_this_machine_are_refused(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.install("shared", STANDING)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    said = refused(team, "exp_name=one", "pretrain=./qwen", "learner.from_scratch=null")
    assert "pretrain: ./qwen is on this machine" in said
    team.submit(
        "exp_name=one", "pretrain=/models/qwen", "learner.from_scratch=null", "learner.warm_start=null"
    )


def test_clusters_that_are_not_there_are_named(team: Team, api: FakeApiServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gp' is not in the kubeconfig \(there: gpu, other\)"):
        Cluster("gp", "team", str(team.kubeconfig))
    with pytest.raises(ConfigError, match="no usable kubeconfig"):
        Cluster("gpu", "team", str(tmp_path / "none"))
    (tmp_path / "gone").write_text(api.kubeconfig("gpu").replace(api.url, "http://127.0.0.1:1"))
    gone = Cluster("gpu", "team", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"--context gpu: .*unreachable"):
        releases.status(gone, "one", team.console)
    with pytest.raises(ConfigError, match=r"no release one in namespace team \(there: none\)"):
        releases.stop(team.cluster, "one", 5, team.console)


def test_status_and_logs_are_those_of_the_runs_pods(team: Team) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one")
    team.api.put(pod("run"))
    waiting = {"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    team.api.put(pod("agents", **waiting))
    team.api.logs["one-run-x"] = "step 3 reward 0.5\n"
    line = '{"event": "episode failed", "timestamp": "2026-01-01T10:00:00Z", "reason": "tool"}\n'
    team.api.logs["one-agents-x"] = line
    releases.status(team.cluster, "one", team.console)
    said = team.said()
    assert "one: run one running" in said
    assert "ImagePullBackOff" in said
    assert "step 3 reward 0.5" in said
    releases.logs(team.cluster, "one", "", 50, False, team.console)
    said = team.said()
    assert "10:00:00 agents" in said
    assert "episode failed reason=tool" in said
    releases.logs(team.cluster, "one", "run", 50, True, team.console)
    assert "step 3" in team.said()
    with pytest.raises(ConfigError, match=r"no pod of learner in release one \(there: agents, run\)"):
        releases.logs(team.cluster, "one", "learner", 5, False, team.console)


def test_status_cuts_no_name_on_a_narrow_terminal(team: Team) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one")
    made = pod("learner")
    name = f"one-learner-{'x' * 50}"
    team.api.put({**made, "metadata": made["metadata"] | {"name": name}})
    releases.status(team.cluster, "one", Console(file=team.screen, width=80))
    cells = [line.partition(" ")[0] for line in team.said().splitlines()]
    assert name in "".join(cells)


def test_status_says_why_a_container_ends_again_and_again(team: Team) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one")
    ended = {"exitCode": 2, "reason": "Error", "message": "stopped\nerror: pretrain: [x] is no model\n"}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    team.api.put(pod("learner", ready=False, state=waiting, lastState={"terminated": ended}))
    team.api.put(pod("agents", lastState={"terminated": ended | {"message": "long ago"}}))
    releases.status(team.cluster, "one", team.console)
    said = team.said()
    assert "one-learner-x ended: error: pretrain: [x] is no model" in said
    assert "long ago" not in said


def test_a_cluster_that_goes_away_is_named_and_a_log_that_breaks_off_says_so(
    team: Team, api: FakeApiServer
) -> None:
    agents = Pod("one-agents-x", "agents", "Running", is_ready=True, restarts=0)
    api.close()
    with pytest.raises(ConfigError, match="the cluster of context gpu does not answer"):
        team.cluster.pods("one")
    assert [line.component for line in team.cluster.follow([agents], 5)] == ["agents"]


def test_the_newest_job_tells_the_state_while_an_upgrade_replaces_it(team: Team) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one")
    ((key, job),) = [each for each in team.api.objects.items() if each[0][1] == "jobs"]
    job["metadata"]["creationTimestamp"] = "2026-11-28T10:00:00Z"
    newer = copy.deepcopy(job)
    newer["metadata"] |= {"name": "one-run-0", "creationTimestamp": "2026-11-28T11:00:00Z"}
    newer["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    team.api.objects[*key[:2], "one-run-0"] = newer
    assert team.cluster.run_state("one") == "finished"
    del newer["status"]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert team.cluster.run_state("one") == "running"


@pytest.mark.parametrize(("condition", "state"), [("Complete", "finished"), ("Failed", "failed")])
def test_a_run_that_has_ended_says_so(condition: str, state: str, team: Team) -> None:
    team.install("shared", STANDING)
    team.submit("exp_name=one")
    (job,) = [each for key, each in team.api.objects.items() if key[1] == "jobs"]
    job["status"] = {"conditions": [{"type": condition, "status": "True"}]}
    releases.status(team.cluster, "one", team.console)
    assert f"run one {state}" in team.said()
    assert f"({state})" in refused(team, "exp_name=one")
