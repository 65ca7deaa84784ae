"""Services of a calibration run, each in its own process, on their own nats-server and Valkey."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from benchmarks.calibration.fake_engine import FOLDER_VARIABLE
from benchmarks.calibration.plans import SEED_VARIABLE
from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Blobs, StoreConnection, connect
from tailrace_cli.cluster.servers import choose_port, nats_server_binary, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos.control import RunStatus
from tailrace_protos.subjects import run_status
from tailrace_protos.weights import ModelCard

RUN = "calibration"
START_S = 60.0


class Cluster(NamedTuple):
    """Connections to the services, and their processes by name."""

    bus: Bus
    store: StoreConnection
    processes: dict[str, psutil.Process]
    folder: Path


@asynccontextmanager
async def cluster(
    folder: Path,
    experiment: dict[str, Any],
    services: dict[str, list[str]],
    *,
    seed: int = 1,
) -> AsyncIterator[Cluster]:
    """Start services; all processes end with the block. `services`: module and arguments by name."""
    ports = (choose_port(0, "calibration"), choose_port(0, "calibration"))
    endpoints = Endpoints(
        nats_url=f"nats://127.0.0.1:{ports[0]}",
        redis_url=f"redis://127.0.0.1:{ports[1]}/0",
        host_id="calibration",
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TAILRACE_NATS_URL": endpoints.nats_url,
        "TAILRACE_REDIS_URL": endpoints.redis_url,
        "TAILRACE_HOST_ID": endpoints.host_id,
        "TAILRACE_METRICS_PORT": "0",
        "TAILRACE_STATE_DIR": str(folder / "state"),
        "TAILRACE_LOG": "json",
        FOLDER_VARIABLE: str(folder),
        SEED_VARIABLE: str(seed),
    }
    config = folder / "experiment.yaml"
    config.write_text(yaml.safe_dump({"exp_name": RUN, "output_dir": str(folder), **experiment}))
    async with AsyncExitStack() as stack:
        processes: dict[str, psutil.Process] = {}

        def start(name: str, argv: list[str]) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("ab"))
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            processes[name] = psutil.Process(process.pid)

        for name, argv in _servers(folder, *ports).items():
            start(name, argv)
        redis = await connect(endpoints.redis_url)
        stack.push_async_callback(redis.aclose)
        await Blobs(redis, RUN).put_model_card(_model_card())
        bus = await Bus.connect(endpoints, name=RUN, run=RUN)
        stack.push_async_callback(bus.close)
        is_up = asyncio.Event()

        async def on_status(status: RunStatus) -> None:
            is_up.set()

        await bus.subscribe(run_status(RUN), RunStatus, on_status)
        for name, (module, *arguments) in services.items():
            start(name, [sys.executable, "-m", module, "--config", str(config), *arguments])
        try:
            await asyncio.wait_for(is_up.wait(), START_S)
            yield Cluster(bus, redis, processes, folder)
        except BaseException:
            _show_logs(folder)
            raise


def _show_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- {path.name}", *lines[-4:], sep="\n", file=sys.stderr)


def sums(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines that the engines wrote, by file."""
    return {
        path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in folder.glob("engine-*.jsonl")
    }


def _servers(folder: Path, nats_port: int, redis_port: int) -> dict[str, list[str]]:
    config = folder / "nats.conf"
    jetstream = {"store_dir": str(folder / "jetstream"), "max_file_store": 1 << 42}
    config.write_text(
        f'listen: "127.0.0.1:{nats_port}"\njetstream: {json.dumps(jetstream)}\n', encoding="utf-8"
    )
    where = ["--port", str(redis_port), "--bind", "127.0.0.1", "--dir", str(folder)]
    durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    return {
        "nats-server": [nats_server_binary(ClusterConfig()), "-c", str(config)],
        "valkey": [redis_server_binary(ClusterConfig()), *where, *durable],
    }


def _model_card() -> ModelCard:
    with tempfile.TemporaryDirectory() as folder:
        build_frozen_lake_tokenizer(folder)
        return ModelCard(b"{}", {path.name: path.read_bytes() for path in Path(folder).iterdir()})


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process; kill one that takes longer than a drain."""
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
