"""Process that takes each version as an inference server does, and writes a line about it.

`python -m tests.contract.weights.server RUN SERVER_ID HOST_ID BIND_HOST`; addresses are in the
environment. A line holds the policy version, a hash of the tensors, the bytes that came over the
network, the bytes passed on, the holders that weight_sync named to it (empty: weight_sync itself), and
the number of process groups that it has joined.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import xxhash

from tailrace.bus import Bus, BusError
from tailrace.config import Endpoints
from tailrace.weights import WeightReceiver, WeightsError
from tailrace_protos.weights import RouteReply, WeightsApplied


def struck(receive: Callable[..., None]) -> Callable[..., None]:
    """`receive` of a member that first gets the signal whose number the test left, if there is one."""
    left = Path(os.environ["STRIKE_AT"])

    def receive_after_signal(*args: Any) -> None:
        if left.exists():
            number = int(left.read_text())
            left.unlink()
            os.kill(os.getpid(), number)
        receive(*args)

    return receive_after_signal


def noted(route: Callable[..., Awaitable[RouteReply]], holders: set[str]) -> Any:
    """`route` of a server, whose answers are kept."""

    async def route_and_note(*args: Any) -> RouteReply:
        reply = await route(*args)
        holders.add(reply.server_id)
        return reply

    return route_and_note


def tell(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def main(run: str, server_id: str, host_id: str, bind_host: str) -> None:
    nats_url, redis_url = os.environ["TAILRACE_NATS_URL"], os.environ["TAILRACE_REDIS_URL"]
    endpoints = Endpoints(nats_url=nats_url, redis_url=redis_url, host_id=host_id)
    bus = await Bus.connect(endpoints, name=server_id, run=run)
    receiver = WeightReceiver(bus, run, host_id, server_id, bind_host=bind_host)
    receiver.member._receive = struck(receiver.member._receive)  # type: ignore[method-assign]
    holders: set[str] = set()
    receiver.relay._route = noted(receiver.relay._route, holders)  # type: ignore[method-assign]
    served = -1
    while True:
        await asyncio.sleep(0.02)
        try:
            available = await receiver.current(attempts=1)
            if available is None or available.manifest.policy_version <= served:
                continue
            staged = await receiver.fetch(available)
        except (BusError, WeightsError) as error:
            tell(error=str(error))
            continue
        served = staged.manifest.policy_version
        content = xxhash.xxh3_64()
        for tensor in staged.tensors():
            content.update(tensor.data)
        await receiver.report(WeightsApplied(server_id, served, 0.1, 0.1, 0.1))
        tell(
            policy_version=served,
            hash=content.hexdigest(),
            num_fetched=staged.num_fetched,
            num_relayed=receiver.relay.num_sent_bytes,
            holders=sorted(holders),
            num_groups=receiver.member.num_groups,
        )
        holders.clear()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
