"""`run_service`: real processes, real signals, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tailrace.bus import Bus
from tailrace.runtime.watchdog import EXIT_BLOCKED
from tests.world.servers import ServerProcess, free_port
from tests.world.serving import outgoing

ROOT = Path(__file__).parents[3]
_START_S = 120.0  # of a process, or its end, on a busy machine


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
    async with asyncio.timeout(_START_S):
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
    assert await asyncio.wait_for(slow.wait(), _START_S) == 0
    said = await lines(quick, 6)
    assert sorted(said) == sorted(
        [f"started g{number}.0 2" for number in range(3)]
        + [f"finished g{number}.0" for number in range(3)]
    )
    quick.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(quick.communicate(), _START_S)
    assert quick.returncode == 0
    assert b'"instance_id": "quick"' in errors
    assert b'"level": "error"' not in errors


async def test_a_second_signal_does_not_wait_for_work_in_flight(
    bus: Bus, nats_server: ServerProcess, tmp_path: Path
) -> None:
    await bus.provision_run(bus.run)
    stuck = await start(nats_server.url, experiment(tmp_path, bus.run), "stuck")
    await bus.publish_durable_many(outgoing(bus.run, range(1)))
    await lines(stuck, 1)
    stuck.send_signal(signal.SIGTERM)
    assert stuck.stderr is not None
    async with asyncio.timeout(_START_S):
        while b"stopping" not in await stuck.stderr.readline():
            pass
    stuck.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(stuck.wait(), _START_S) == 0


async def test_a_mistake_seen_at_start_exits_2_with_a_clear_line(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    holder = await asyncio.start_server(lambda *_: None, "127.0.0.1", port := free_port())
    config = experiment(tmp_path, run_name)
    process = await start(nats_server.url, config, "w", TAILRACE_METRICS_PORT=str(port))
    _, errors = await asyncio.wait_for(process.communicate(), _START_S)
    holder.close()
    text = errors.decode()
    assert process.returncode == 2, text
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert last.startswith(
        f"error: cannot listen on 127.0.0.1:{port} for metrics (Address already in use)"
    )


async def test_a_service_that_computes_for_ever_in_its_event_loop_says_where_and_ends(
    bus: Bus, nats_server: ServerProcess, tmp_path: Path
) -> None:
    await bus.provision_run(bus.run)
    process = await start(nats_server.url, experiment(tmp_path, bus.run), "spinning")
    said, logged = await asyncio.wait_for(process.communicate(), _START_S)
    assert b"spins" in said
    assert process.returncode == EXIT_BLOCKED
    assert b"event loop stays blocked" in logged + said
    assert b"in spin" in logged + said
