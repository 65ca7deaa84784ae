"""Configuration of the sandbox service: the section `sandbox` of an experiment file."""

from typing import Any, Literal

import msgspec

from tailrace.config import Config

MIB = 1024 * 1024
BACKENDS = {
    "process": "tailrace_sandbox.adapters.backends:process_sandbox",
    "docker": "tailrace_sandbox.adapters.backends:docker_sandbox",
    "agent_sandbox": "tailrace_sandbox.adapters.backends:agent_sandbox",
}
_TOOLS = ("python", "shell", "python_session")


class CallLimits(Config, frozen=True, kw_only=True):
    """Limits of one call; for a session they hold over its whole life, except time, which counts per
    call."""

    wall_s: float = 10.0
    """Time limit of a call that requests no other limit; it may request up to `max_wall_s`."""

    max_wall_s: float = 60.0
    """Largest time limit that a call may request."""

    cpu_s: int = 120
    """Processor time of each single process."""

    memory_bytes: int = 512 * MIB
    """Memory of all processes of a call together, without files; pipes and sockets count as full."""

    max_processes: int = 32
    """Processes and threads of a call at any moment."""

    disk_bytes: int = 64 * MIB
    """Bytes in a call's folder, with deleted files that are still open."""

    max_files: int = 1024
    """Files and folders in a call's folder."""

    max_open_files: int = 128
    """Open files of each single process."""

    max_mappings: int = 16384
    """Memory mappings of all processes of a call together. The kernel's memory for them counts to no
    process, and many of them slow the checks down."""

    max_output_bytes: int = 64 * 1024
    """Bytes kept of standard output, and as many of standard error. The rest is dropped; a call that
    writes 64 times as much is ended."""

    max_transfer_bytes: int = 8 * MIB
    """Bytes of all files that go into or come out of one call."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ValueError(f"limits.{key} must be positive")
        if self.wall_s > self.max_wall_s:
            raise ValueError("limits.wall_s must not be more than limits.max_wall_s")


class DockerConfig(Config, frozen=True, kw_only=True):
    """Containers of Docker (`backend: docker`). `limits` hold for each; files count as memory."""

    image: str = ""
    """Image in which tool code runs. `python` and `python_session` need `python3` in it (3.7 or later);
    `shell` needs `/bin/sh`; files need `tar`, `find` and `head`."""

    images: dict[str, str] = msgspec.field(default_factory=dict)
    """Other images, by the name of the tool: `python`, `shell`, `python_session`."""

    task_images: tuple[str, ...] = ()
    """Images that a data row may choose, as patterns (`swebench/*`). A row chooses by `image` in its
    `tools_kwargs`, for `python_session` and, with `keep_shell`, for `shell`."""

    pull: Literal["missing", "never"] = "missing"
    """Fetching of an image that this machine lacks."""

    pull_s: float = 600.0
    """Time in which a container must start, the download of its image included."""

    cpus: float = 1.0
    """Processors of a container."""

    user: str = "65534:65534"
    """User and group of tool code in the container; not root."""

    workdir: str = ""
    """Folder in which tool code starts, for example the repository in the image of a task. Empty: a new
    folder in memory, up to `limits.disk_bytes`."""

    read_only: bool = True
    """Read-only root of the container. Without it tool code may change files of its image that `user`
    may change; Docker's storage alone limits how much they write there."""

    runtime: str = ""
    """Docker's runtime, for example `runsc` (gVisor) or `kata`; empty: the daemon's default."""

    program: str = "docker"
    """Docker's command line. `DOCKER_HOST` and Docker's other variables hold for it."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.images) - set(_TOOLS))
        if unknown:
            raise ValueError(f"docker.images: {unknown[0]!r} is none of the tools {', '.join(_TOOLS)}")
        if self.user.split(":")[0] in ("", "0", "root"):
            raise ValueError("docker.user must be another user than root")
        if self.cpus <= 0 or self.pull_s <= 0:
            raise ValueError("docker.cpus and docker.pull_s must be positive")


class AgentSandboxConfig(Config, frozen=True, kw_only=True):
    """Pods of kubernetes-sigs/agent-sandbox (`backend: agent_sandbox`). The template of a warm pool
    limits a pod; of `limits` those of time, output and transfer hold."""

    warm_pool: str = ""
    """`SandboxWarmPool` from which pods come."""

    warm_pools: dict[str, str] = msgspec.field(default_factory=dict)
    """Other warm pools, by the name of the tool: `python`, `shell`, `python_session`."""

    task_warm_pools: tuple[str, ...] = ()
    """Warm pools that a data row may choose, as patterns, by `image` in its `tools_kwargs`."""

    namespace: str = "default"
    """Kubernetes namespace of the claims."""

    api_url: str = ""
    """Address of the sandbox router. Empty: the service runs in the cluster and reaches pods itself."""

    server_port: int = 8888
    """Port of the runtime in a pod."""

    ready_s: float = 180.0
    """Time in which a claim must be ready."""

    lifetime_s: float = 3600.0
    """Age at which the cluster removes a claim, whatever became of this service."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.warm_pools) - set(_TOOLS))
        if unknown:
            tools = ", ".join(_TOOLS)
            raise ValueError(f"agent_sandbox.warm_pools: {unknown[0]!r} is none of the tools {tools}")
        if self.ready_s < 1 or self.lifetime_s < 1:
            raise ValueError("agent_sandbox.ready_s and lifetime_s must be at least 1")


class SandboxConfig(Config, frozen=True, kw_only=True):
    """The sandbox service."""

    backend: str = "process"
    """Place of tool code: `process` (confined processes of this machine), `docker` (containers, also
    one image per task), `agent_sandbox` (pods of kubernetes-sigs/agent-sandbox), or `module:Class` of
    yours (`docs/sandbox.md`)."""

    backend_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments for a `module:Class` of yours."""

    docker: DockerConfig = DockerConfig()
    """Containers of Docker."""

    agent_sandbox: AgentSandboxConfig = AgentSandboxConfig()
    """Pods of Kubernetes."""

    keep_shell: bool = False
    """One container per episode for `shell`: its files stay from command to command, and the data row
    may choose the image. Not with the backend `process`."""

    limits: CallLimits = CallLimits()
    """Bounds of each call."""

    tool_limits: dict[str, dict[str, int | float]] = msgspec.field(default_factory=dict)
    """Other bounds by the name of the tool (`python`, `shell`, `python_session`); those that are not
    named are those of `limits`."""

    max_concurrency: int = 2
    """Calls that run at once, each in its own process; further calls wait."""

    max_sessions: int = 16
    """Open sessions of `python_session`, each in its own processes."""

    tier: Literal["full", "partial", "none"] = "full"
    """Least confinement that the service accepts. `partial` also accepts a machine without Landlock or
    without seccomp. `none` accepts any machine: then another mechanism must isolate the service.
    `tailrace doctor` prints the tier of a machine."""

    python: str = ""
    """Interpreter that runs tool code. Empty: the one that runs Tailrace, or /usr/bin/python3 if the
    sandbox's user may not enter its folder."""

    preload: tuple[str, ...] = ()
    """Modules that are imported before every call, for example numpy. If a module seeds random numbers
    at its import, they are the same in each call."""

    readable: tuple[str, ...] = ()
    """Folders and files that tool code may read in addition to the system's programs and the
    interpreter."""

    workspace_dir: str = ""
    """Parent of the folders of calls; empty: the system's folder for temporary files."""

    first_uid: int = 64000
    """First of the user ids for processes that run tool code, if the service runs as root. Each process
    takes another one. These users must own no files."""

    drain_s: float = 10.0
    """Time for running calls to end after SIGTERM."""

    def __post_init__(self) -> None:
        self._check_backend()
        if self.max_concurrency < 1 or self.max_sessions < 1:
            raise ValueError("max_concurrency and max_sessions must be at least 1")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        if self.first_uid < 1000:
            raise ValueError("first_uid must be at least 1000: lower ones belong to the system")
        for tool in self.tool_limits:
            self._check_limits(tool)

    def limits_of(self, tool: str) -> CallLimits:
        """Returns the bounds of the calls of a tool."""
        given = self.tool_limits.get(tool)
        if not given:
            return self.limits
        return msgspec.convert({**msgspec.to_builtins(self.limits), **given}, CallLimits)

    def _check_limits(self, tool: str) -> None:
        if tool not in _TOOLS:
            raise ValueError(f"tool_limits: {tool!r} is none of the tools {', '.join(_TOOLS)}")
        unknown = sorted(self.tool_limits[tool].keys() - set(CallLimits.__struct_fields__))
        if unknown:
            known = ", ".join(CallLimits.__struct_fields__)
            raise ValueError(f"tool_limits.{tool}: {unknown[0]!r} is none of the limits {known}")
        try:
            self.limits_of(tool)
        except msgspec.ValidationError as error:
            raise ValueError(f"tool_limits.{tool}: {error}") from error

    def _check_backend(self) -> None:
        if ":" not in self.backend and self.backend not in BACKENDS:
            raise ValueError(
                f"backend is {self.backend!r}: take one of {', '.join(BACKENDS)}, or module:Class"
            )
        if self.backend_args and ":" not in self.backend:
            raise ValueError("backend_args are for a backend module:Class alone")
        if self.keep_shell and self.backend == "process":
            raise ValueError("keep_shell needs a backend with containers: docker or agent_sandbox")
