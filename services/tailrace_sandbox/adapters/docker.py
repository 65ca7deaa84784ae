"""Boxes of Docker, by its command line: one container per call or session.

Invariants: a container has no network, no capabilities, a read-only root, a user without rights and the
limits of a call; the code of a call travels by descriptors, never through a shell of this machine; no
container outlives the service: a guard process removes them when the service's end of its pipe closes,
and the next service of this machine removes what a machine without a guard left.
"""

import asyncio
import contextlib
import os
import re
import uuid
from fnmatch import fnmatchcase
from pathlib import Path

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace_sandbox.adapters.box import BoxAnswer, BoxCommand
from tailrace_sandbox.adapters.docker_program import Docker
from tailrace_sandbox.config import CallLimits, DockerConfig, SandboxConfig
from tailrace_sandbox.ports import TOOLS, SandboxLostError

log = get_logger(__name__)

LABEL = "tailrace.sandbox"
WORK_DIR = "/tailrace"  # in no image: a folder that is there would give its mode to the one mounted
_PAUSE_TRIES = 5
_OWN_PROCESSES = 2  # of a container: its first one, and what that waits for
_IDLE = "while :; do sleep 86400; done"
_OOM_FILES = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
_READ_OOM_KILLS = ("/bin/sh", "-c", f"cat {_OOM_FILES} 2>/dev/null; exit 0")  # some runtimes have none
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_GUARD = """
program=$1 label=$2
cat >/dev/null
for _ in 1 2 3; do
    ids=$("$program" ps -aq --filter "label=$label")
    [ -z "$ids" ] || "$program" rm -f $ids
    sleep 1
done
"""


class DockerBoxes:
    """`Boxes` of one Docker daemon."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config.docker
        self._limits_of = config.limits_of
        self._docker = Docker(config.docker.program)
        self._owner = own_process()
        self._guard: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """See `Boxes`."""
        try:
            await self._start()
        except SandboxLostError as error:
            raise ConfigError(f"sandbox.backend is docker: {error}") from error

    async def _start(self) -> None:
        code, output, error = await self._docker.order("version", "--format", "{{.Server.Version}}")
        if code:
            raise ConfigError(
                f"sandbox.backend is docker, but {self._config.program!r} reaches no Docker daemon "
                f"({error}): start one, or set DOCKER_HOST"
            )
        await self._remove_left()
        for image in {self._config.image, *self._config.images.values()}:
            await self._check_image(image)
        self._guard = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _GUARD, "sh", self._config.program, f"{LABEL}={self._owner}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, env=self._docker.environment, start_new_session=True,
        )  # fmt: skip
        log.info("sandbox", backend="docker", version=output, image=self._config.image)

    async def _check_image(self, image: str) -> None:
        if not image:
            raise ConfigError("sandbox.docker.image is missing: name the image in which tool code runs")
        code, _, _ = await self._docker.order("image", "inspect", "--format", "{{.Id}}", image)
        if code == 0:
            return
        if self._config.pull == "never":
            raise ConfigError(f"sandbox.docker: this machine has no image {image!r}: build or pull it")
        code, _, error = await self._docker.order("pull", "-q", image, within_s=self._config.pull_s)
        if code:
            raise ConfigError(f"sandbox.docker: no image {image!r} here, and docker pull says: {error}")

    async def _remove_left(self) -> None:
        """Remove containers of services of this machine that live no more."""
        code, output, _ = await self._docker.order(
            "ps",
            "-a",
            "--filter",
            f"label={LABEL}",
            "--format",
            f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}',
        )
        listed = [line.split(" ", 1) for line in output.splitlines()] if code == 0 else []
        left = [name for name, owner in listed if has_ended(owner)]
        if left:
            log.warning("removed containers of a service that was killed", count=len(left))
            await self._docker.order("rm", "-f", *left)

    async def open(self, mode: str, image: str) -> "Container":
        """See `Boxes`. An image of a task must match `sandbox.docker.task_images`."""
        config = self._config
        if image and not any(fnmatchcase(image, pattern) for pattern in config.task_images):
            raise ValueError(
                f"the image {image!r} of this task matches none of sandbox.docker.task_images: add it"
            )
        tool = TOOLS[mode]
        image = image or config.images.get(tool, config.image)
        name = f"tailrace-{uuid.uuid4().hex}"
        argv = run_command(config, self._limits_of(tool), image, name, self._owner)
        started = False
        try:
            code, _, error = await self._docker.order(*argv, within_s=config.pull_s)
            if code:
                raise SandboxLostError(f"docker does not start the image {image!r}: {error}")
            started = True
        finally:
            if not started:
                await asyncio.shield(self._docker.order("rm", "-f", name))
        return Container(self._docker, name, config.workdir or WORK_DIR)

    async def close(self) -> None:
        """See `Boxes`. The guard is needed no more."""
        mine = f"label={LABEL}={self._owner}"
        _, output, _ = await self._docker.order("ps", "-aq", "--filter", mine)
        if left := output.split():
            await self._docker.order("rm", "-f", *left)
        if self._guard is not None:
            self._guard.kill()
            await self._guard.wait()


def run_command(
    config: DockerConfig, limits: CallLimits, image: str, name: str, owner: str
) -> tuple[str, ...]:
    """Order that starts an idle container with every limit."""
    folder = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes},nr_inodes={limits.max_files + 1}"
    return (
        "run", "--detach", "--name", name, "--label", f"{LABEL}={owner}", "--pull", config.pull,
        *(("--runtime", config.runtime) if config.runtime else ()),
        *(("--read-only",) if config.read_only else ()),
        "--network", "none", "--user", config.user, "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ipc", "private",
        "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes),
        "--pids-limit", str(limits.max_processes + _OWN_PROCESSES), "--cpus", f"{config.cpus:g}",
        "--ulimit", f"nofile={limits.max_open_files}", "--ulimit", f"cpu={limits.cpu_s}",
        "--ulimit", "core=0", "--shm-size", "1m", "--log-driver", "none",
        "--tmpfs", f"{WORK_DIR}:{folder}", "--tmpfs", f"/tmp:{folder}",
        "--env", f"HOME={WORK_DIR}", "--env", f"TMPDIR={WORK_DIR}",
        "--entrypoint", "/bin/sh", image, "-c", _IDLE,
    )  # fmt: skip


class Container:
    """`Box` that is a running container."""

    def __init__(self, docker: Docker, name: str, workdir: str) -> None:
        self._docker = docker
        self._name = name
        self._workdir = workdir
        self._num_oom_kills = 0

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        """See `Box`. A command that takes too long or floods its output ends with its container."""
        argv = ("exec", "--interactive", "--workdir", self._workdir, self._name, *command.argv)
        answer = await self._docker.answer(argv, command)
        if answer.reason:
            await self.close()
            return answer
        return await self._checked(answer) if answer.exit_code else answer

    async def _checked(self, answer: BoxAnswer) -> BoxAnswer:
        """The answer with the reason of its failure, if memory was that."""
        code, output, error = await self._docker.order("exec", self._name, *_READ_OOM_KILLS)
        if code:
            raise SandboxLostError(f"the container of the call is gone: {error}")
        found = _OOM_KILLS.search(output.encode())
        num_oom_kills = int(found[1]) if found else 0
        is_new = num_oom_kills > self._num_oom_kills
        self._num_oom_kills = num_oom_kills
        if not is_new:
            return answer
        return BoxAnswer(answer.exit_code, answer.stdout, answer.stderr, "memory", answer.is_cut)

    async def pause(self) -> None:
        """See `Box`: the kernel's freezer stops it, though on busy machines not at the first try."""
        for tries_left in reversed(range(_PAUSE_TRIES)):
            try:
                await self._must("pause")
                return
            except SandboxLostError:
                if not tries_left:
                    raise

    async def resume(self) -> None:
        """See `Box`."""
        await self._must("unpause")

    async def _must(self, order: str) -> None:
        code, _, error = await self._docker.order(order, self._name)
        if code:
            raise SandboxLostError(f"docker {order}: {error}")

    async def close(self) -> None:
        """See `Box`."""
        await self._docker.order("rm", "-f", self._name)


def own_process() -> str:
    """Name of this process that no other one has had: boot, process namespace, pid and its start."""
    return "-".join((*_machine(), str(os.getpid()), _started(os.getpid())))


def has_ended(owner: str) -> bool:
    """Tell whether `owner` names a process of this machine that is gone; False where we cannot know."""
    *machine, pid, started = ["", "", *owner.split("-")]
    if tuple(machine[2:]) != _machine() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


def _machine() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot.replace("-", ""), re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


def _started(pid: int) -> str:
    """Start of a process in ticks since the boot; empty when it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    return ""
