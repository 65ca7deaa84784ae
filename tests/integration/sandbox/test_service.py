"""The sandbox service in a process of its own, called through the servers of a local cluster."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tailrace.tools import ToolClient
from tests.integration.sandbox.cluster import (
    DEADLINE_S,
    TOOLS,
    Cluster,
    Sandbox,
    call,
    children,
    until,
)

SECTION = {"drain_s": 30.0, "limits": {"wall_s": 60.0}}
FOREVER = "while True: pass"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Used by all tests here, which leave it with one sandbox."""
    made = Cluster(Path(tmp_path_factory.mktemp("cluster")), SECTION)
    made.start(num_sandboxes=1)
    yield made
    made.close()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[ToolClient]:
    async with cluster.caller() as made:
        yield made


async def gone(processes: list[psutil.Process]) -> bool:
    """Returns whether all of them end."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=DEADLINE_S)
    return alive == []


def forked_twice(sandbox: Sandbox) -> tuple[psutil.Process, list[psutil.Process]] | None:
    """The zygote whose call has four processes by now, and these."""
    for zygote in sandbox.zygotes():
        if len(family := children(zygote, recursive=True)) == 4:
            return zygote, family
    return None


@pytest.fixture
def flag() -> Iterator[Path]:
    """A file that is not there yet, in a folder that calls may look into."""
    with tempfile.TemporaryDirectory(prefix="flag-") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "flag"


def waiting_for(flag: Path) -> str:
    """A program that ends when the file is there; calls cannot read it, but see that it exists."""
    return f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\nprint('done')"


async def test_an_episode_calls_all_three_tools(client: ToolClient) -> None:
    async with client.session("e1", TOOLS) as tools:
        assert [schema.name for schema in await tools.schemas()] == list(TOOLS)
        assert (await call(tools, "python", code="print(6 * 7)")).content == "42"
        assert (
            await call(tools, "shell", command="echo here; exit 4")
        ).content == "here\n[exit code 4]"
        await call(tools, "python_session", code="x = 5")
        assert (await call(tools, "python_session", code="x + 1")).content == "6"


async def test_episodes_share_no_session(client: ToolClient) -> None:
    async with client.session("e1", TOOLS) as first, client.session("e2", TOOLS) as second:
        await call(first, "python_session", code="x = 'mine'")
        assert "NameError" in (await call(second, "python_session", code="x")).content
        assert (await call(first, "python_session", code="x")).content == "'mine'"


async def test_a_session_ends_with_its_episode(cluster: Cluster, client: ToolClient) -> None:
    sandbox = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        await call(tools, "python_session", code="x = 5")
        held = await until(sandbox.running_calls)
    await until(lambda: not sandbox.running_calls())
    assert await gone(held)


async def test_files_too_big_for_a_message_go_in_and_come_out(client: ToolClient) -> None:
    content = {"base64": base64.b64encode(b"\xffx" * 1_500_000).decode()}
    code = "data = open('in', 'rb').read(); open('out', 'wb').write(data.upper()); print(len(data))"
    async with client.session("e1", TOOLS) as tools:
        result = await call(tools, "python", code=code, files={"in": content}, outputs=["out"])
    found = json.loads(result.content)
    assert found["stdout"] == "3000000\n"
    assert base64.b64decode(found["files"]["out"]["base64"]) == b"\xffX" * 1_500_000


async def test_what_the_service_knows_is_not_in_a_call(client: ToolClient) -> None:
    code = "import os; print(sorted(k for k in os.environ if 'TAILRACE' in k), os.listdir('.'))"
    async with client.session("e1", TOOLS) as tools:
        assert (await call(tools, "python", code=code)).content == "[] []"


async def test_a_cancelled_call_leaves_no_process(cluster: Cluster, client: ToolClient) -> None:
    sandbox = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        calling = asyncio.create_task(call(tools, "python", code=FOREVER))
        running = await until(sandbox.running_calls)
        calling.cancel()
        assert await gone(running)
        assert (await call(tools, "python", code="print('next')")).content == "next"


async def test_a_call_whose_zygote_dies_runs_again(
    cluster: Cluster, client: ToolClient, flag: Path
) -> None:
    sandbox = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        await call(tools, "python", code="print('it is up')")
        fork = "import os\nos.makedirs('a/b')\nfirst = os.getpid()\nos.fork()\nos.fork()\n"
        code = f"{fork}{waiting_for(flag)} if os.getpid() == first else None"
        calling = asyncio.create_task(call(tools, "python", code=code))
        zygote, family = await until(lambda: forked_twice(sandbox))
        zygote.kill()
        assert await gone(family)
        flag.touch()
        assert (await calling).content == "done"
        assert (await call(tools, "python", code="print('next')")).content == "next"


async def test_a_dead_zygote_ends_its_session_and_the_model_is_told(
    cluster: Cluster, client: ToolClient
) -> None:
    sandbox = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        await call(tools, "python_session", code="x = 5")
        (process,) = await until(sandbox.running_calls)
        process.parent().kill()
        assert await gone([process])
        lost = await call(tools, "python_session", code="x")
        assert not lost.infra_error
        assert "the session was lost" in lost.content
        assert (await call(tools, "python_session", code="1 + 1")).content == "2"


async def test_a_call_whose_service_dies_runs_again_on_another(
    cluster: Cluster, client: ToolClient, flag: Path
) -> None:
    first = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        await call(tools, "python_session", code="x = 5")
        calling = asyncio.create_task(call(tools, "python", code=waiting_for(flag)))
        await until(lambda: len(first.running_calls()) == 2)
        left, base = first.family(), first.base()
        first.process.kill()
        first.ends()
        assert base.is_dir()
        second = cluster.start_sandbox()  # as the supervisor would: under the same name
        flag.touch()
        assert (await calling).content == "done"
        assert await gone(left)
        assert (await call(tools, "python_session", code="x")).infra_error
    async with client.session("e2", TOOLS) as tools:
        assert (await call(tools, "python_session", code="1 + 1")).content == "2"
    assert second.process.poll() is None
    assert not base.exists()


async def test_sigterm_lets_a_call_end_and_leaves_nothing(
    cluster: Cluster, client: ToolClient, flag: Path
) -> None:
    sandbox = cluster.sandboxes[-1]
    async with client.session("e1", TOOLS) as tools:
        await call(tools, "python", code="print('it is up')")
        base = sandbox.base()
        assert base.is_dir()
        calling = asyncio.create_task(call(tools, "python", code=waiting_for(flag)))
        await until(sandbox.running_calls)
        family = sandbox.family()
        sandbox.process.send_signal(signal.SIGTERM)
        await until(lambda: "SIGTERM" in sandbox.log.read_text())
        flag.touch()
        assert (await calling).content == "done"
    assert sandbox.ends() == 0
    assert await gone(family)
    assert not base.exists()
    cluster.start_sandbox()


async def test_a_call_that_outlasts_the_drain_is_an_infra_failure(tmp_path: Path) -> None:
    other = Cluster(tmp_path, {**SECTION, "drain_s": 0.5})
    other.start(num_sandboxes=1)
    (sandbox,) = other.sandboxes
    try:
        async with other.caller() as caller, caller.session("e1", TOOLS) as tools:
            await call(tools, "python", code="print('it is up')")
            calling = asyncio.create_task(call(tools, "python", code=FOREVER))
            await until(sandbox.running_calls)
            family = sandbox.family()
            sandbox.process.send_signal(signal.SIGTERM)
            assert "shut down" in (await calling).infra_error
        assert sandbox.ends() == 0
        assert await gone(family)
    finally:
        other.close()


def test_an_interpreter_that_is_not_there_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    made = Cluster(tmp_path, {"python": "/nowhere/python"})
    made.start(num_sandboxes=0)
    try:
        sandbox = made.start_sandbox()
        assert sandbox.ends() == 2
        last_line = sandbox.log.read_text().splitlines()[-1]
        assert "sandbox.python" in last_line
        assert "/nowhere/python" in last_line
    finally:
        made.close()
