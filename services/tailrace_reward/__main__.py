"""The reward process: loads the functions, then answers score requests."""

from __future__ import annotations

import sys

from tailrace.config import ConfigError
from tailrace.runtime import Args, Service, run_service
from tailrace_protos import subjects
from tailrace_protos.reward import ScoreRequest
from tailrace_reward.adapters.process_pool import FunctionLoadError, ProcessPool
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.handlers import ScoreHandler


async def build(args: Args) -> Service:
    """The service; function rewards that cannot be loaded are a `ConfigError` before it starts."""
    config = args.section("reward", RewardConfig)
    pool = await _start_pool(config, args.config)
    service = Service(
        "reward", args.run, args.endpoints, instance_id=args.instance_id, drain_s=config.drain_s
    )
    handler = ScoreHandler(Scorer(config.rewards, pool))
    service.endpoint(
        subjects.score(args.run.exp_name), ScoreRequest, handler.score, mailbox=config.mailbox
    )
    service.on_drain(pool.close)
    return service


async def _start_pool(config: RewardConfig, source: str) -> ProcessPool:
    places = {
        entry.function: f"reward.rewards[{index}].function"
        for index, entry in enumerate(config.rewards)
        if entry.kind == "function"
    }
    pool = ProcessPool(tuple(places), config.num_processes)
    if not places:
        return pool
    try:
        await pool.start()
    except FunctionLoadError as error:
        reasons = "; ".join(
            f"{places[function]} {function!r}: {reason}" for function, reason in error.errors.items()
        )
        raise ConfigError(
            f"{source}: {reasons}. Write it module:name, with the module in the folder where Tailrace "
            "was started or installed in its environment"
        ) from error
    return pool


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
