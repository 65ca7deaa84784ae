"""Channel servers of one inference server, and their addresses for callers."""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from nats.aio.client import Client

from tailrace.channel import (
    CurveKeys,
    GenerateHandler,
    GenerateServer,
    NatsGenerateServer,
    ZmqGenerateServer,
)
from tailrace.config import ConfigError, advertised_host
from tailrace_inference.config import InferenceConfig

_LOOPBACK = ("127.0.0.1", "localhost")
_MAX_IPC_PATH = 100


class Listeners:
    """Starts and stops the configured transports."""

    def __init__(
        self, config: InferenceConfig, nats: Client, subject: str, server_id: str, state_dir: Path
    ) -> None:
        self._config = config
        self.nats_subject = subject if "nats" in config.transports else ""
        self.zmq_public_key = ""
        self._zmq: ZmqGenerateServer | None = None
        self._servers: list[GenerateServer] = []
        if self.nats_subject:
            self._servers.append(NatsGenerateServer(nats, subject))
        if "zmq" in config.transports:
            self._zmq = self._make_zmq(server_id, state_dir)
            self._servers.append(self._zmq)

    @property
    def zmq_endpoint(self) -> str:
        """Address for ZMQ callers once started; empty without ZMQ."""
        if self._zmq is None:
            return ""
        bind_host, advertised = self._config.bind_host, self._config.advertise_host
        if bind_host in ("0.0.0.0", "*") and not advertised:
            advertised = advertised_host()
        endpoint = self._zmq.endpoint
        return f"tcp://{advertised}:{endpoint.rsplit(':', 1)[1]}" if advertised else endpoint

    async def start(self, handler: GenerateHandler) -> None:
        """Starts to listen; raises `EndpointError` when an endpoint is not available."""
        for server in self._servers:
            await server.start(handler)

    async def stop(self) -> None:
        """Sends queued chunks, then stops listening."""
        for server in self._servers:
            await server.stop()

    def _make_zmq(self, server_id: str, state_dir: Path) -> ZmqGenerateServer:
        if not self._config.bind_host:
            return ZmqGenerateServer(f"ipc://{socket_path(server_id, state_dir)}")
        keys = None
        if self._config.bind_host not in _LOOPBACK:
            keys = CurveKeys.generate()
            self.zmq_public_key = keys.public
        return ZmqGenerateServer(f"tcp://{self._config.bind_host}:*", keys=keys)


def socket_path(server_id: str, state_dir: Path) -> Path:
    """Path in the state directory, or in a private folder of the temporary one if that is too long.

    /tmp takes the place of a temporary folder with a long name of its own, as batch systems give.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / f"{server_id}.sock"
    if len(os.fsencode(path)) <= _MAX_IPC_PATH:
        return path
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    own = f"tailrace-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / own
    if len(os.fsencode(folder / f"{digest}.sock")) > _MAX_IPC_PATH:
        folder = Path("/tmp") / own
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user alone: remove it, or choose a shorter output_dir"
        )
    return folder / f"{digest}.sock"
