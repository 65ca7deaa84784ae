"""Boxes of kubernetes-sigs/agent-sandbox: pods from a warm pool, by its asynchronous Python client.

Invariants: a pod serves one call or session, and its claim is deleted after it; claims carry the name
of their service, which removes those of its predecessor at its start, and an age at which the cluster
removes them; text of a model reaches the pod's shell only quoted.
"""

import asyncio
import base64
import binascii
import hashlib
import re
import shlex
import time
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_extra
from tailrace.log import get_logger
from tailrace_sandbox.adapters.box import BoxAnswer, BoxCommand
from tailrace_sandbox.config import AgentSandboxConfig, SandboxConfig
from tailrace_sandbox.ports import TOOLS, SandboxLostError

log = get_logger(__name__)

LABEL = "tailrace.dev/sandbox"
_KEY = "sandbox.backend"
_CLUSTER_S = 30.0  # for an answer of the cluster
_GRACE_S = 10  # of the transport, beyond the time of a command
_FOLDER = ".tailrace"
_MAX_LABEL = 63
# Runs "$@" with its input and outputs in files, then prints both outputs in base64, a line each, and
# the exit code. $1: folder of the command, $2: bytes of an output, $3: seconds.
_SCRIPT = """
d=$1 n=$2 s=$3; shift 3; mkdir -p "$d"; [ -e "$d/in" ] || : >"$d/in"
timeout -s KILL "$s" "$@" <"$d/in" >"$d/out" 2>"$d/err"; c=$?
head -c "$n" "$d/out" | base64 | tr -d '\\n'; echo
head -c "$n" "$d/err" | base64 | tr -d '\\n'; echo
echo $c; rm -rf "$d"
"""
T = TypeVar("T")


class AgentPods:
    """`Boxes` of one Kubernetes namespace. `client`: of the package, unless a test brings its own."""

    def __init__(self, config: SandboxConfig, owner: str, client: Any = None) -> None:
        self._config = config.agent_sandbox
        self._labels = {LABEL: label_of(owner)}
        self._client = client

    async def start(self) -> None:
        """See `Boxes`."""
        config = self._config
        if not config.warm_pool:
            raise ConfigError("sandbox.agent_sandbox.warm_pool is missing: name a SandboxWarmPool")
        if self._client is None:
            self._client = _client(config)
        ((key, value),) = self._labels.items()
        try:
            left = await _asked(
                "list", self._client.list_all_sandboxes(config.namespace, f"{key}={value}"), _CLUSTER_S
            )
        except SandboxLostError as error:
            raise ConfigError(
                f"{_KEY} is agent_sandbox, but no Kubernetes cluster with the agent-sandbox controller "
                f"answers ({error}): run the service in the cluster, or give it a kubeconfig"
            ) from error
        for name in left:
            await _asked("delete", self._client.delete_sandbox(name, config.namespace), _CLUSTER_S)
        log.info("sandbox", backend="agent_sandbox", namespace=config.namespace, num_removed=len(left))

    async def open(self, mode: str, image: str) -> "AgentPod":
        """See `Boxes`. `image` is the name of a warm pool here."""
        config = self._config
        if image and not any(fnmatchcase(image, pattern) for pattern in config.task_warm_pools):
            raise ValueError(
                f"the warm pool {image!r} of this task matches none of "
                "sandbox.agent_sandbox.task_warm_pools: add it"
            )
        claiming = self._client.create_sandbox(
            image or config.warm_pools.get(TOOLS[mode], config.warm_pool),
            config.namespace,
            int(config.ready_s),
            labels=self._labels,
            shutdown_after_seconds=int(config.lifetime_s),
        )
        sandbox = await _asked("create_sandbox", claiming, config.ready_s + _CLUSTER_S)
        return AgentPod(self._client, sandbox, config.namespace)

    async def close(self) -> None:
        """See `Boxes`."""
        if self._client is not None:
            with suppress(SandboxLostError):  # the claims end by their age
                await _asked("delete_all", self._client.delete_all(), _CLUSTER_S)
                await _asked("close", self._client.close(), _CLUSTER_S)


class AgentPod:
    """`Box` that is a claimed pod. Its runtime takes one command line, which it splits like a shell."""

    def __init__(self, client: Any, sandbox: Any, namespace: str) -> None:
        self._client = client
        self._sandbox = sandbox
        self._claim = sandbox.claim_name
        self._namespace = namespace

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        """See `Box`."""
        folder = f"{_FOLDER}/{uuid.uuid4().hex}"
        within_s = command.wall_s + _GRACE_S
        if command.stdin:
            writing = self._sandbox.files.write(f"{folder}/in", command.stdin, timeout=_GRACE_S)
            await _asked("files.write", writing, within_s)
        line = shlex.join(command_line(command, folder))
        began_s = time.perf_counter()
        running = self._sandbox.commands.run(line, timeout=int(within_s))
        result = await _asked("commands.run", running, within_s + _GRACE_S)
        took_s = time.perf_counter() - began_s
        return await asyncio.to_thread(answer_of, result.stdout, command, took_s)

    async def pause(self) -> None:
        """See `Box`. The runtime cannot stop processes: what a session leaves running goes on, within
        the limits of its pod."""

    async def resume(self) -> None:
        """See `Box`."""

    async def close(self) -> None:
        """See `Box`."""
        try:
            deleting = self._client.delete_sandbox(self._claim, self._namespace)
            await _asked("delete_sandbox", deleting, _CLUSTER_S)
        except SandboxLostError as error:
            log.warning("a claim stays until its age ends it", claim=self._claim, reason=str(error))


def command_line(command: BoxCommand, folder: str) -> tuple[str, ...]:
    """Words that run a command in a pod with its limits; input and outputs are files in `folder`."""
    limits = (folder, str(command.max_output_bytes + 1), f"{command.wall_s:g}")
    return ("/bin/sh", "-c", _SCRIPT, "sh", *limits, *command.argv)


def answer_of(stdout: str, command: BoxCommand, took_s: float) -> BoxAnswer:
    """Answer in the output of `command_line`; raises `SandboxLostError` for anything else."""
    try:
        output, error, code = stdout.split("\n")[:3]
        streams = [base64.b64decode(line, validate=True) for line in (output, error)]
        exit_code = int(code)
    except (ValueError, binascii.Error) as wrong:
        raise SandboxLostError(f"the pod did not answer as its runtime does: {wrong}") from wrong
    kept = [stream[: command.max_output_bytes] for stream in streams]
    is_cut = any(len(stream) > command.max_output_bytes for stream in streams)
    is_late = exit_code in _KILLED and took_s >= command.wall_s
    return BoxAnswer(exit_code, kept[0], kept[1], "wall_clock" if is_late else "", is_cut)


_KILLED = (124, 137)  # exit codes of `timeout` after it ended its command


def label_of(owner: str) -> str:
    """Name of a service as a value of a label, which takes less characters: made unique by a digest."""
    digest = hashlib.sha256(owner.encode()).hexdigest()[:12]
    plain = re.sub(r"[^A-Za-z0-9]+", "-", owner).strip("-")
    return f"{plain[: _MAX_LABEL - len(digest) - 1]}-{digest}".lstrip("-")


def connection_of(config: AgentSandboxConfig) -> tuple[str, dict[str, Any]]:
    """Name of the package's connection model, and its fields."""
    if config.api_url:
        fields = {"api_url": config.api_url, "server_port": config.server_port}
        return "SandboxDirectConnectionConfig", fields
    return "SandboxInClusterConnectionConfig", {"server_port": config.server_port}


def _client(config: AgentSandboxConfig) -> Any:
    package = load_extra("k8s_agent_sandbox.async_sandbox_client", "agent-sandbox", _KEY)
    models = load_extra("k8s_agent_sandbox.models", "agent-sandbox", _KEY)
    model, fields = connection_of(config)
    return package.AsyncSandboxClient(connection_config=getattr(models, model)(**fields))


async def _asked(what: str, answer: Awaitable[T], within_s: float) -> T:
    """Answer of the client; each of its errors is a `SandboxLostError`."""
    try:
        with foreign_code(what):
            async with asyncio.timeout(within_s):
                return await answer
    except ForeignCodeError as error:
        raise SandboxLostError(str(error)) from error
