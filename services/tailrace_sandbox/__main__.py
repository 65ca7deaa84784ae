"""The sandbox process: confines, then serves its tools to its run."""

import sys
import uuid

from tailrace.runtime import Args, Service, run_service
from tailrace.store import StoreConnection, connect
from tailrace.tools import ToolWorker
from tailrace_sandbox.adapters.backends import open_sandbox
from tailrace_sandbox.adapters.tools import offers
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.ports import Sandbox

_CLOSE_S = 15.0  # for each step of the end, once running calls had their `drain_s`


class _Process:
    """Tool worker, sandbox and Redis connection of one process."""

    def __init__(self, args: Args, config: SandboxConfig, sandbox: Sandbox) -> None:
        self._config = config
        self._sandbox = sandbox
        self._redis: StoreConnection | None = None
        self._worker: ToolWorker | None = None
        self._run = args.run.exp_name
        # New at each start: sessions of the process before are found dead.
        # A subject of two tokens, which no other tool worker may listen to.
        self._worker_id = f"sandbox.{args.instance_id}-{uuid.uuid4().hex[:8]}"
        self.service = Service(
            "sandbox",
            args.run,
            args.endpoints,
            instance_id=args.instance_id,
            drain_s=config.drain_s + _CLOSE_S,
        )
        self.service.on_start(self.start)
        self.service.on_drain(self.close)
        self.service.on_drain(self.drain)  # which comes before `close`

    async def start(self) -> None:
        """Serve the tools. Redis carries files that are too big for a message."""
        self._redis = await connect(self.service.endpoints.redis_url)
        self._worker = ToolWorker(
            offers(self._sandbox, self._config),
            self.service.bus,
            max_concurrency=self._config.max_concurrency + self._config.max_sessions,
            max_sessions=self._config.max_sessions,  # further ones wait at their callers
            run=self._run,
            worker_id=self._worker_id,
            redis=self._redis,
        )
        await self._worker.start()

    async def drain(self) -> None:
        """Let calls and sessions end."""
        if self._worker is not None:
            await self._worker.drain(self._config.drain_s)

    async def close(self) -> None:
        """Remove everything that the service made."""
        await self._sandbox.close()
        if self._redis is not None:
            await self._redis.aclose()


async def build(args: Args) -> Service:
    """The service; a machine that confines less than configured is a `ConfigError` before it starts."""
    config = args.section("sandbox", SandboxConfig)
    sandbox = await open_sandbox(config, f"{args.run.exp_name}.{args.instance_id}")
    return _Process(args, config, sandbox).service


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
