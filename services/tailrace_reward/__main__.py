"""Process of the reward service: opens the components, then answers score requests."""

import sys

from tailrace.runtime import Args, Service, run_service
from tailrace.tools import ToolClient
from tailrace_protos import subjects
from tailrace_protos.reward import ScoreRequest
from tailrace_reward.adapters.components import open_components
from tailrace_reward.adapters.judge import RunGateway
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tailrace_reward.handlers import ScoreHandler


async def build(args: Args) -> Service:
    """Build the service; a component that cannot be loaded is a `ConfigError` before it starts."""
    config = args.section("reward", RewardConfig)
    service = Service(
        "reward", args.run, args.endpoints, instance_id=args.instance_id, drain_s=config.drain_s
    )
    tools = ToolClient(service.bus, args.run.exp_name)
    gateway = RunGateway(service.bus, args.run.exp_name)
    components = await open_components(config, args.config, tools=tools, gateway=gateway)
    handler = ScoreHandler(Scorer(config.components, components.by_name))
    service.endpoint(
        subjects.score(args.run.exp_name), ScoreRequest, handler.score, mailbox=config.mailbox
    )
    service.on_drain(components.close)
    service.on_drain(gateway.close)
    service.on_drain(tools.close)
    return service


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
