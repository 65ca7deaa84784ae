"""The work queue's listing on a real nats-server."""

from __future__ import annotations

from tailrace.bus import Bus
from tailrace_protos import subjects
from tailrace_protos.event import Event, EventBatch, HintChanged
from tailrace_scheduler.adapters.nats_queue import NatsQueue
from tests.world.serving import episode, eventually


async def test_the_listing_names_every_message_of_its_phase_also_across_batches(bus: Bus) -> None:
    queue = NatsQueue(bus, bus.run)
    await queue.provision()
    assert await queue.held("train") == {}
    tasks = [episode(number) for number in range(2_500)]
    await queue.publish(tasks)
    await bus.jetstream.publish(subjects.episodes(bus.run, "train"), b"no episode")
    assert await queue.held("train") == {task.episode_id: task for task in tasks}
    assert await queue.count("train") == 2_501
    assert await queue.held("eval") == {}


async def test_vanished_streams_and_consumers_are_found_and_made_anew(bus: Bus) -> None:
    queue, js = NatsQueue(bus, bus.run), bus.jetstream
    await queue.provision()
    assert await queue.missing() == []
    await queue.publish([episode(1)])
    await js.delete_consumer(subjects.episodes_stream(bus.run), "train")
    await js.delete_stream(subjects.events_stream(bus.run))
    await js.delete_stream(f"KV_{subjects.registry_bucket(bus.run)}")
    gone = {
        subjects.events_stream(bus.run),
        f"KV_{subjects.registry_bucket(bus.run)}",
        f"{subjects.episodes_stream(bus.run)}/train",
    }
    assert set(await queue.missing()) == gone
    await queue.provision()
    assert await queue.missing() == []
    assert await queue.count("train") == 1


async def test_an_event_that_is_too_large_holds_up_no_other(bus: Bus) -> None:
    queue = NatsQueue(bus, bus.run)
    await queue.provision()
    followed: list[str] = []

    async def on_events(batch: EventBatch) -> None:
        followed.extend(event.seq for event in batch.events)

    await bus.subscribe(subjects.events(bus.run), EventBatch, on_events)
    texts = ["a", "b" * 2_000_000, "c"]
    await queue.announce(
        [
            Event(f"{n}-0", 1.0, "scheduler", HintChanged("x", is_raised=True, text=text, step=0))
            for n, text in enumerate(texts)
        ]
    )
    await eventually(lambda: "2-0" in followed)
    assert followed == ["0-0", "2-0"]
