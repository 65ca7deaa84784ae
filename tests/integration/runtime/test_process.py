"""`run_service`: real processes, real signals, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tailrace.bus import Bus
from tests.conftest import ServerProcess
from tests.integration.runtime.serving import outgoing

ROOT = Path(__file__).parents[3]


async def start(url: str, config: Path, worker_id: str, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "worker_process.py"),
        *("--config", str(config), "--worker-id", worker_id),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "TAILRACE_NATS_URL": url,
            "TAILRACE_REDIS_URL": "redis://unused",
            "TAILRACE_LOG": "json",
            **env,
        },
    )


def experiment(directory: Path, run: str) -> Path:
    path = directory / "experiment.yaml"
    path.write_text(f"exp_name: {run}\n")
    return path


async def lines(process: asyncio.subprocess.Process, count: int) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return [(await process.stdout.readline()).decode().strip() for _ in range(count)]


async def test_sigterm_hands_work_in_flight_to_another_process_and_exits_0(
    bus: Bus, nats_server: ServerProcess, tmp_path: Path
) -> None:
    await bus.provision_run(bus.run)  # ack wait 30 s
    config = experiment(tmp_path, bus.run)
    slow = await start(nats_server.url, config, "slow")
    await bus.publish_durable_many(outgoing(bus.run, range(3)))
    assert sorted(await lines(slow, 3)) == [f"started g{number}.0 1" for number in range(3)]

    quick = await start(nats_server.url, config, "quick")
    slow.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(slow.wait(), 10) == 0
    said = await lines(quick, 6)
    assert sorted(said) == sorted(
        [f"started g{number}.0 2" for number in range(3)] + [f"finished g{number}.0" for number in range(3)]
    )
    quick.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(quick.communicate(), 10)
    assert quick.returncode == 0
    assert b'"instance_id": "quick"' in errors
    assert b'"level": "error"' not in errors


async def test_a_second_signal_does_not_wait_for_work_in_flight(
    bus: Bus, nats_server: ServerProcess, tmp_path: Path
) -> None:
    await bus.provision_run(bus.run)
    slow = await start(nats_server.url, experiment(tmp_path, bus.run), "slow")
    await bus.publish_durable_many(outgoing(bus.run, range(1)))
    await lines(slow, 1)
    slow.send_signal(signal.SIGTERM)
    slow.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(slow.wait(), 10) == 0


async def test_the_users_mistakes_exit_2_with_one_clear_line(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    good = experiment(tmp_path, run_name)
    bad = tmp_path / "bad.yaml"
    bad.write_text("exp_name: r\nmax_stepz: 3\n")
    mistakes = [
        (good, "misconfigured", {}, "no such colour"),
        (bad, "w", {}, "did you mean 'max_steps'"),
        (tmp_path / "missing.yaml", "w", {}, "cannot read experiment file"),
        (good, "a b", {}, "--instance-id 'a b'"),
        (good, "w", {"TAILRACE_LOG": "xml"}, "TAILRACE_LOG='xml'"),
        (good, "w", {"TAILRACE_METRICS_PORT": "many"}, "TAILRACE_METRICS_PORT"),
    ]
    for config, worker_id, env, words in mistakes:
        process = await start(nats_server.url, config, worker_id, **env)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        text = errors.decode()
        assert process.returncode == 2, text
        assert words in text
        assert text.startswith("error: ")
        assert text.count("\n") == 1
