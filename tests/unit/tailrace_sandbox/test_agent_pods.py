"""Pods of agent-sandbox: command lines, answers and labels; and the tools over a fake cluster.

The fake runs a pod's command lines on this machine, in a folder of its own, as the runtime in a pod
does: it splits the line into words, starts them without a shell and returns text. It confines nothing,
so all programs here are the project's own.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tailrace.config import ConfigError
from tailrace_sandbox.adapters.agent_pods import (
    AgentPods,
    answer_of,
    command_line,
    connection_of,
    label_of,
)
from tailrace_sandbox.adapters.backends import open_sandbox
from tailrace_sandbox.adapters.box import BoxCommand
from tailrace_sandbox.adapters.boxes import BoxSandbox
from tailrace_sandbox.config import AgentSandboxConfig, SandboxConfig
from tailrace_sandbox.ports import SandboxLostError, Work

CONFIG = SandboxConfig(
    backend="agent_sandbox",
    keep_shell=True,
    agent_sandbox=AgentSandboxConfig(
        warm_pool="plain", warm_pools={"shell": "tools"}, task_warm_pools=("task-*",)
    ),
)


class FakePod:
    """A claimed pod, and its runtime."""

    def __init__(self, claim_name: str, folder: Path) -> None:
        self.claim_name = claim_name
        self._folder = folder
        self.commands = self.files = self

    async def write(self, path: str, content: bytes, timeout: int) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    async def run(self, line: str, timeout: int) -> Any:
        done = await asyncio.to_thread(
            subprocess.run,
            shlex.split(line),
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode)


class FakeCluster:
    """Claims of one namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.claims: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []

    async def list_all_sandboxes(self, namespace: str, label_selector: str) -> list[str]:
        key, value = label_selector.split("=")
        return [name for name, claim in self.claims.items() if claim["labels"].get(key) == value]

    async def create_sandbox(
        self, warmpool: str, namespace: str, sandbox_ready_timeout: int, **more: Any
    ) -> FakePod:
        name = f"claim-{len(self.claims) + len(self.deleted)}"
        asked = {"namespace": namespace, "ready_s": sandbox_ready_timeout}
        self.claims[name] = {"warm_pool": warmpool, **asked, **more}
        return FakePod(name, Path(tempfile.mkdtemp(dir=self._folder)))

    async def delete_sandbox(self, claim_name: str, namespace: str) -> None:
        self.deleted.append(self.claims.pop(claim_name)["warm_pool"])

    async def delete_all(self) -> None:
        self.claims.clear()

    async def close(self) -> None:
        return None


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path)


@pytest.fixture
async def sandbox(cluster: FakeCluster) -> AsyncIterator[BoxSandbox]:
    made = BoxSandbox(AgentPods(CONFIG, "run.sandbox-0", cluster), CONFIG)
    await made.start()
    yield made
    await made.close()


def run_here(command: BoxCommand, folder: Path) -> str:
    """Output of the pod's command line, run as the runtime runs it."""
    line = shlex.join(command_line(command, ".tailrace/x"))
    done = subprocess.run(
        shlex.split(line), cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout


@pytest.mark.parametrize("word", ["", "a b", "$HOME", "'", '"', "`id`", "a\nb", "\\", "*", "é"])
def test_words_reach_the_program_as_they_are(word: str, tmp_path: Path) -> None:
    command = BoxCommand(("printf", "%s", word), 60.0)
    answer = answer_of(run_here(command, tmp_path), command, 0.0)
    assert (answer.exit_code, answer.stdout.decode()) == (0, word)
    assert list((tmp_path / ".tailrace").iterdir()) == []


def test_bytes_of_any_kind_come_back_and_are_cut(tmp_path: Path) -> None:
    command = BoxCommand(("printf", r"\377\000abc"), 5.0, max_output_bytes=3)
    answer = answer_of(run_here(command, tmp_path), command, 0.0)
    assert (answer.stdout, answer.is_cut) == (b"\xff\0a", True)


def test_a_command_that_takes_too_long_is_ended_in_the_pod(tmp_path: Path) -> None:
    command = BoxCommand(("sh", "-c", "echo begun; sleep 30"), 0.3)
    answer = answer_of(run_here(command, tmp_path), command, 0.31)
    assert (answer.stdout, answer.reason) == (b"begun\n", "wall_clock")


@pytest.mark.parametrize("said", ["", "x", "!!\n!!\n0\n", "\n\nzero\n", "YQ==\nYQ==\n"])
def test_a_pod_that_answers_something_else_is_lost(said: str) -> None:
    with pytest.raises(SandboxLostError, match="did not answer as its runtime does"):
        answer_of(said, BoxCommand(("true",), 1.0), 0.0)


@pytest.mark.parametrize("owner", ["run.sandbox-0", "-._", "ü" * 80, "a" * 200])
def test_names_of_services_fit_into_labels(owner: str) -> None:
    label = label_of(owner)
    assert 1 <= len(label) <= 63
    assert label.replace("-", "").isalnum()
    assert label.isascii()
    assert label[0] != "-"
    assert label != label_of(owner + "1")


async def test_programs_files_and_sessions_work_over_a_cluster(
    sandbox: BoxSandbox, cluster: FakeCluster
) -> None:
    work = Work("python", "print(input()); open('o', 'w').write('x')", 5.0, "in", {"a/b": b"1"}, ("o",))
    outcome = await sandbox.run(work)
    assert (outcome.stdout, outcome.files) == ("in\n", {"o": b"x"})
    shell = await sandbox.open_session("kept_shell", "task-7")
    await shell.execute(Work("kept_shell", "echo 'a' >f", 60.0))
    assert (await shell.execute(Work("kept_shell", "cat f", 60.0))).stdout == "a\n"
    assert [claim["warm_pool"] for claim in cluster.claims.values()] == ["task-7"]
    await shell.close()
    assert (cluster.claims, cluster.deleted) == ({}, ["plain", "task-7"])


async def test_a_command_that_is_not_there_is_told_as_the_shell_tells_it(sandbox: BoxSandbox) -> None:
    shell = await sandbox.open_session("kept_shell")
    outcome = await shell.execute(Work("kept_shell", "no-such-command", 60.0))
    assert outcome.exit_code == 127
    assert "no-such-command" in outcome.stderr
    code = "import sys; sys.stderr.write('mine'); sys.exit(127)"
    assert (await sandbox.run(Work("python", code, 60.0))).stderr == "mine"


async def test_a_command_that_ignores_its_end_was_stopped_too(sandbox: BoxSandbox) -> None:
    shell = await sandbox.open_session("kept_shell")
    work = Work("kept_shell", "trap '' TERM; while :; do sleep 0.1; done", 0.2)
    assert (await shell.execute(work)).reason == "stopped"


async def test_a_session_whose_call_was_cancelled_is_over(sandbox: BoxSandbox) -> None:
    shell = await sandbox.open_session("kept_shell")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await shell.execute(Work("kept_shell", "sleep 1", 60.0))
    with pytest.raises(SandboxLostError):
        await shell.execute(Work("kept_shell", "true", 60.0))
    await shell.close()


async def test_a_service_removes_the_claims_of_its_predecessor_alone(cluster: FakeCluster) -> None:
    config = msgspec.structs.replace(CONFIG)
    first = AgentPods(config, "run.sandbox-0", cluster)
    other = AgentPods(config, "run.sandbox-1", cluster)
    await first.open("shell", "")
    await other.open("python", "")
    await AgentPods(config, "run.sandbox-0", cluster).start()
    assert [claim["warm_pool"] for claim in cluster.claims.values()] == ["plain"]
    assert cluster.deleted == ["tools"]


async def test_a_task_gets_only_a_warm_pool_that_it_may_have(sandbox: BoxSandbox) -> None:
    with pytest.raises(ValueError, match="task_warm_pools"):
        await sandbox.open_session("session", "other")


async def test_without_the_package_the_start_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"tailrace\[agent-sandbox\]"):
        await open_sandbox(CONFIG, "run.sandbox-0")


async def test_without_a_warm_pool_the_start_says_so() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.agent_sandbox\.warm_pool"):
        await open_sandbox(SandboxConfig(backend="agent_sandbox"), "run.sandbox-0")


async def test_claims_are_made_as_the_configuration_says(cluster: FakeCluster) -> None:
    section = AgentSandboxConfig(warm_pool="p", namespace="n", ready_s=7.0, lifetime_s=99.0)
    pods = AgentPods(SandboxConfig(backend="agent_sandbox", agent_sandbox=section), "owner", cluster)
    await pods.open("python", "")
    (claim,) = cluster.claims.values()
    assert (claim["namespace"], claim["ready_s"]) == ("n", 7)
    assert claim["shutdown_after_seconds"] == 99


def test_pods_are_reached_in_the_cluster_or_through_a_router() -> None:
    inside = AgentSandboxConfig(server_port=7)
    assert connection_of(inside) == ("SandboxInClusterConnectionConfig", {"server_port": 7})
    outside = AgentSandboxConfig(api_url="http://router", server_port=7)
    fields = {"api_url": "http://router", "server_port": 7}
    assert connection_of(outside) == ("SandboxDirectConnectionConfig", fields)
