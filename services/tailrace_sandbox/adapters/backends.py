"""Backends of the service, by the value of `sandbox.backend`."""

import inspect

from tailrace.import_path import load_object
from tailrace_sandbox.adapters.agent_pods import AgentPods
from tailrace_sandbox.adapters.boxes import BoxSandbox
from tailrace_sandbox.adapters.docker import DockerBoxes
from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.config import BACKENDS, SandboxConfig
from tailrace_sandbox.ports import Sandbox

_KEY = "sandbox.backend"


async def open_sandbox(config: SandboxConfig, owner: str) -> Sandbox:
    """The configured backend, started; `ConfigError` if it cannot work here.

    `owner`: name of this service, which another one takes only after its end.
    """
    make = load_object(BACKENDS.get(config.backend, config.backend), _KEY)
    is_own = config.backend in BACKENDS
    made = make(config, owner) if is_own else make(config, **config.backend_args)
    sandbox: Sandbox = await made if inspect.isawaitable(made) else made
    await sandbox.start()
    return sandbox


async def process_sandbox(config: SandboxConfig, owner: str) -> Sandbox:
    """Confined processes of this machine."""
    return Runner(await prepare(config))


def docker_sandbox(config: SandboxConfig, owner: str) -> Sandbox:
    """Containers of Docker."""
    return BoxSandbox(DockerBoxes(config), config)


def agent_sandbox(config: SandboxConfig, owner: str) -> Sandbox:
    """Pods of kubernetes-sigs/agent-sandbox."""
    return BoxSandbox(AgentPods(config, owner), config)
