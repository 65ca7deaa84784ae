"""Turns of a gateway's sessions in the traces of their episodes."""

from __future__ import annotations

from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink
from tests.world.gateway import GatewayWorld

USER = {"role": "user", "content": "Hi"}


async def test_a_model_call_is_a_turn_of_its_episodes_trace(world: GatewayWorld) -> None:
    spans: list[FinishedSpan] = []
    args = TracingArgs(mlflow="sqlite://", sample_rate=1.0)
    tracing.configure(RunConfig(exp_name="unit", tracing=args), "gateway", "g")
    tracing.add_sink(Sink(spans.append, lambda: None))
    try:
        opened, root = await world.open("t1.0"), tracing.episode("t1.0")
        await world.openai(opened).chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    finally:
        tracing.close()
    (turn,) = (span for span in spans if span.name == "turn")
    assert turn.parent == root
    assert world.model.requests[0].traceparent == turn.traceparent
    assert turn.attributes["num_sampled_tokens"] > 0
