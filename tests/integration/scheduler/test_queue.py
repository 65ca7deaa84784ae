"""The work queue's listing on a real nats-server."""

from __future__ import annotations

from tailrace.bus import Bus
from tailrace_protos import subjects
from tailrace_scheduler.adapters.nats_queue import NatsQueue
from tests.world.serving import episode


async def test_the_listing_names_every_message_of_its_phase_also_across_batches(bus: Bus) -> None:
    queue = NatsQueue(bus, bus.run)
    await queue.provision()
    assert await queue.held("train") == {}
    tasks = [episode(number) for number in range(2_500)]
    await queue.publish(tasks)
    await bus.connection.client.publish(subjects.episodes(bus.run, "train"), b"no episode")
    await bus.connection.client.flush()
    assert await queue.held("train") == {task.episode_id: task for task in tasks}
    assert await queue.count("train") == 2_501
    assert await queue.held("eval") == {}
