"""Chat completions with OpenAI's own client, over real HTTP, NATS, Redis and ZMQ."""

from __future__ import annotations

from tests.integration.gateway.world import World


async def test_a_conversation_of_two_turns_is_one_sequence_of_tokens(world: World) -> None:
    opened = await world.open()
    client = world.openai(opened)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]
    first = await client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
    assert first.choices[0].message.content == "Hello there."
    assert first.choices[0].finish_reason == "stop"
    messages += [
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "And?"},
    ]
    await client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
    export = await world.export(rewards={"": 1.0})
    assert len(export.rows) == 2
    assert export.metrics["num_forks"] == 0
