"""One run's local cluster: start the servers, then every service; stop them in the reverse order."""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from tailrace.config import ConfigError, Endpoints
from tailrace.runtime.service import CLOSE_TIMEOUT_S
from tailrace_cli.cluster.attached import Attachment, claim
from tailrace_cli.cluster.disk_watch import DiskWatch
from tailrace_cli.cluster.guardian import Guardian
from tailrace_cli.cluster.placement import GpuDemand, place
from tailrace_cli.cluster.plan import (
    ProcessSpec,
    Site,
    check_gpus,
    inference_python,
    service_specs,
    tool_worker_specs,
)
from tailrace_cli.cluster.servers import (
    NATS_URL,
    REDIS_URL,
    Credentials,
    ServerAddresses,
    connection_environment,
    keep_port,
    nats_command,
    redis_command,
    reserve_port,
    wait_until_listening,
)
from tailrace_cli.cluster.supervisor import Supervisor
from tailrace_cli.experiment import Experiment, count_gateways
from tailrace_cli.launch import record_launch

SERVERS = ("nats", "redis")
_LEARNER = "learner"
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.02
SERVER_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
ADMIN_KEY = "TAILRACE_GATEWAY_ADMIN_KEY"  # made up unless the environment has one


class RunGoesOnError(ConfigError):
    """Another process drives the run."""

    def __init__(self, run_dir: Path, holder: int | str) -> None:
        super().__init__(
            f"run {run_dir.name} is already going on in {run_dir} (process {holder}): wait for it, "
            "stop it, or choose another exp_name"
        )


class LocalCluster:
    """The processes of one run on this machine; use as an async context manager."""

    def __init__(
        self,
        experiment: Experiment,
        attachment: Attachment | None = None,
        tell: Callable[[str], None] = lambda _message: None,
        num_gpus: int = 0,
    ) -> None:
        """`num_gpus`: GPUs of this machine that torch sees."""
        self._num_gpus = num_gpus
        self._tell = tell
        self._watching: asyncio.Task[None] | None = None
        self._experiment = experiment
        self._attachment = attachment
        self.run_dir = experiment.run.run_dir
        self.state_dir = self.run_dir / "state"
        self._lock: IO[str] | None = None
        self._gateway_port: socket.socket | None = None
        self._server_ports: list[socket.socket] = []  # kept as long as the servers may start again
        self._guardian: Guardian | None = None
        self._services: list[str] = []

    async def __aenter__(self) -> "LocalCluster":
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            await self.start()
            undo.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns when the servers accept and the services are launched."""
        config = self._experiment.cluster
        check_gpus(config, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._prepare_run_dir()
        self._prepare_logs_dir()
        self._guardian = Guardian(self._experiment.run.exp_name)
        self.supervisor = Supervisor(
            self._experiment.run.logs_dir,
            max_restarts=config.max_restarts,
            restart_window_s=config.restart_window_s,
            max_failed_starts=config.max_failed_starts,
            guardian=self._guardian,
            tell=self._tell,
        )
        connection = await self._attach() if self._attachment else await self._start_servers()
        self.endpoints = Endpoints.from_env(connection_environment("cli", connection))
        self._write_urls(connection)
        for spec in self._plan(connection):
            self._services.append(spec.name)
            await self.supervisor.start(spec)
        self._watching = asyncio.create_task(self._disk_watch().run(), name="disk watch")

    def _write_urls(self, connection: ServerAddresses) -> None:
        """Tells commands that join the run; the URLs of --attach may hold passwords."""
        for name, url in ((NATS_URL, connection.nats_url), (REDIS_URL, connection.redis_url)):
            path = self.state_dir / name
            path.touch(0o600)
            path.write_text(url)

    def _plan(self, connection: ServerAddresses) -> list[ProcessSpec]:
        experiment = self._experiment
        num_gateways = count_gateways(experiment)
        if num_gateways:
            gateway = experiment.gateway
            self._gateway_port = reserve_port(gateway.host, gateway.port, "gateway.port")
        site = Site(
            config_path=self.run_dir / "config.yaml",
            state_dir=self.state_dir,
            connection=connection,
            num_threads=experiment.cluster.num_threads,
            gateway_port=self._gateway_port.getsockname()[1] if self._gateway_port else 0,
            gateway_admin_key=os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(32),
            user_modules=experiment.folder,
            otlp_endpoint=experiment.run.tracing.resolved_endpoint,
            placement=place(GpuDemand.of(experiment), self._num_gpus),
        )
        tool_workers = tool_worker_specs(experiment.cluster, experiment.run.exp_name, site)
        python = inference_python(experiment.cluster, experiment.inference.engine)
        cluster = msgspec.structs.replace(experiment.cluster, inference_python=python)
        return [*tool_workers, *service_specs(cluster, num_gateways, site)]

    async def stop(self) -> None:
        """Drain the services, then end the servers; nothing of the cluster is left running."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if hasattr(self, "supervisor"):
            drain_s = self._experiment.learner.drain_s + CLOSE_TIMEOUT_S
            # The learner saves a checkpoint, and needs the others for it.
            await self.supervisor.stop([_LEARNER], drain_s)
            await self.supervisor.stop(self._services, self._experiment.cluster.drain_s)
            await self.supervisor.stop(list(SERVERS), self._experiment.cluster.drain_s)
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None
        self._give_ports_back()
        if self._gateway_port is not None:
            self._gateway_port.close()
            self._gateway_port = None
        if self._lock is not None:
            for name in (NATS_URL, REDIS_URL):
                (self.state_dir / name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _prepare_run_dir(self) -> None:
        try:
            self.run_dir.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.run_dir.parent).free
            wanted = self._experiment.cluster.min_free_disk_bytes
            if free < wanted:
                raise ConfigError(
                    f"only {free >> 20} MiB free under {self.run_dir}, {wanted >> 20} MiB wanted: free "
                    "some space, choose another output_dir, or lower cluster.min_free_disk_bytes"
                )
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.state_dir.chmod(0o700)  # also that of a run before
            self._lock = take_lock(self.state_dir)
            config = self.run_dir / "config.yaml"
            config.touch(0o600)  # it may name keys of judges and trackers
            config.write_text(self._experiment.to_yaml(), encoding="utf-8")
            record_launch(self.run_dir, self._experiment.folder or Path.cwd())
        except OSError as error:
            raise ConfigError(
                f"cannot use run directory {self.run_dir}: {error.strerror}; choose another output_dir"
            ) from error

    def _prepare_logs_dir(self) -> None:
        logs_dir = self._experiment.run.logs_dir
        try:
            logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use {logs_dir} for logs: {error.strerror}; choose another logging_dir"
            ) from error

    def _give_ports_back(self) -> None:
        while self._server_ports:
            self._server_ports.pop().close()

    async def _start_servers(self) -> ServerAddresses:
        config, run = self._experiment.cluster, self._experiment.run.exp_name
        keys = Credentials.load_or_make(self.state_dir)
        for port, key in (
            (config.nats_port, "cluster.nats_port"),
            (config.redis_port, "cluster.redis_port"),
        ):
            self._server_ports.append(keep_port(port, key))
        numbers = [int(kept.getsockname()[1]) for kept in self._server_ports]
        if sys.platform != "linux":  # elsewhere a bound port is nobody else's, not even the server's
            self._give_ports_back()
        ports = dict(zip(SERVERS, numbers, strict=True))
        commands = {
            "nats": nats_command(config, self.state_dir, ports["nats"], run, keys),
            "redis": redis_command(config, self.state_dir, ports["redis"], run, keys),
        }
        for name in SERVERS:
            await self.supervisor.start(ProcessSpec(name, commands[name], SERVER_ENVIRONMENT))
        for name in SERVERS:
            await self._wait_for_server(name, ports[name])
        return ServerAddresses(
            nats_url=f"nats://127.0.0.1:{ports['nats']}",
            redis_url=f"redis://127.0.0.1:{ports['redis']}/0",
            nats_passwords=keys.nats,
            redis_passwords=keys.redis,
        )

    async def _wait_for_server(self, name: str, port: int) -> None:
        supervisor = self.supervisor
        log_path = supervisor.log_path(name)
        await wait_until_listening(port, name, log_path, lambda: name in supervisor.num_restarts)

    def _disk_watch(self) -> DiskWatch:
        supervisor = self.supervisor
        restart = None if self._attachment else lambda: supervisor.restart("nats")
        return DiskWatch(self.run_dir, supervisor.log_path("nats"), restart, self._tell)

    async def _attach(self) -> ServerAddresses:
        assert self._attachment is not None
        is_new = not (self.run_dir / "events.jsonl").exists()
        await claim(self._attachment, self._experiment.run.exp_name, is_new=is_new)
        return ServerAddresses(self._attachment.nats_url, self._attachment.redis_url)


def take_lock(state_dir: Path) -> IO[str]:
    """The run directory's lock, held until the file is closed; `ConfigError` while another holds it."""
    path = state_dir / "lock"
    lock = path.open("a+")
    for num_left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if num_left:  # `tailrace status` may hold it for a moment
                time.sleep(_LOCK_PAUSE_S)
                continue
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise RunGoesOnError(state_dir.parent, holder) from error
        if _is_at(path, lock):
            break
        lock.close()  # a start with `--overwrite` has deleted it meanwhile
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("a+")
    else:
        lock.close()
        raise RunGoesOnError(state_dir.parent, "unknown")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def clear_run_dir(run_dir: Path) -> None:
    """Delete what a run's directory holds (`--overwrite`); refuses one in use, and one of no run.

    The directory stays, since it may be a link to another disk. What tells that it is a run's goes
    last: one that is deleted in part can be deleted again.
    """
    if not run_dir.exists():
        return
    content = {path.name: path for path in run_dir.iterdir()}
    config, state_dir = content.pop("config.yaml", None), content.pop("state", None)
    if config is None and (content or state_dir):
        raise ConfigError(
            f"{run_dir} holds no config.yaml, so it is no run directory: delete it by hand, or choose "
            "another exp_name or output_dir"
        )
    with take_lock(state_dir) if state_dir else contextlib.nullcontext():
        for path in (*content.values(), *filter(None, (state_dir, config))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
