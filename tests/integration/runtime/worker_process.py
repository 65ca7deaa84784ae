"""A worker as its own process: writes what it did to stdout, one word a line."""

from __future__ import annotations

import asyncio
import sys

from tailrace.config import ConfigError
from tailrace.runtime import Args, Delivery, Service, run_service
from tailrace_protos import subjects
from tailrace_protos.episode import EpisodeTask


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def build(args: Args) -> Service:
    if args.instance_id == "misconfigured":
        raise ConfigError(f"{args.config}: agents.colour: no such colour")
    drain_s = 60.0 if args.worker_id == "stuck" else 1.0
    service = Service("worker", args.run, args.endpoints, instance_id=args.worker_id, drain_s=drain_s)

    async def handler(task: EpisodeTask, delivery: Delivery) -> None:
        say("started", task.episode_id, delivery.num_delivered)
        if args.worker_id in ("slow", "stuck"):
            await asyncio.Event().wait()
        say("finished", task.episode_id)

    async def spin() -> None:
        say("spins")
        while True:
            pass

    if args.worker_id == "spinning":
        service.max_blocked_s = 0.5
        service.loop("spin", spin)
    service.pull(
        subjects.episodes_stream(args.run.exp_name), "train", EpisodeTask, handler, max_in_flight=8
    )
    return service


if __name__ == "__main__":
    sys.exit(run_service(build))
