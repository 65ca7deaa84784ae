"""Spans on their way to an OTLP receiver, as the settings say."""

from __future__ import annotations

import json

import pytest
from prometheus_client import REGISTRY

from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace_protos.chat import ChatMessage
from tests.world.otlp import otlp_receiver

MESSAGES = [ChatMessage("user", "6*7?"), ChatMessage("assistant", "42")]


def play(args: TracingArgs) -> None:
    tracing.configure(RunConfig(exp_name="unit", tracing=args), "agents", "a1")
    with tracing.span("play", tracing.episode("t1.0"), reward=1.0, messages=MESSAGES):
        pass
    tracing.close()


@pytest.mark.parametrize("messages", [False, True])
def test_spans_have_messages_only_where_the_experiment_says_so(messages: bool) -> None:
    with otlp_receiver() as receiver:
        play(TracingArgs(endpoint=receiver.url, sample_rate=1.0, messages=messages))
    (span,) = receiver.spans
    assert (span.service, span.name) == ("tailrace_agents", "play")
    assert span.attributes["tailrace.reward"] == 1.0
    assert ("gen_ai.input.messages" in span.attributes) == messages
    if messages:
        reply = json.loads(str(span.attributes["gen_ai.output.messages"]))
        assert reply == [{"role": "assistant", "parts": [{"type": "text", "content": "42"}]}]


def test_no_episode_is_traced_at_a_sample_rate_of_0() -> None:
    with otlp_receiver() as receiver:
        play(TracingArgs(endpoint=receiver.url, sample_rate=0.0))
    assert receiver.spans == []


def test_spans_beyond_the_queues_limit_are_dropped_and_counted() -> None:
    labels = {"receiver": "otlp", "result": "dropped"}
    before = REGISTRY.get_sample_value("tailrace_tracing_spans_total", labels) or 0.0
    with otlp_receiver() as receiver:
        args = TracingArgs(endpoint=receiver.url, sample_rate=1.0, max_queued_spans=4)
        tracing.configure(RunConfig(exp_name="unit", tracing=args), "agents", "a1")
        root = tracing.episode("t1.0")
        for turn in range(500):
            tracing.record("turn", root, 1.0, 2.0, turn=turn)
        tracing.close()
    dropped = (REGISTRY.get_sample_value("tailrace_tracing_spans_total", labels) or 0.0) - before
    assert len(receiver.spans) + dropped == 500
    assert dropped > 0


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ("authorization=Bearer%20key", "code: 401"),
        ("authorization=secret%0A", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_a_refusal_is_logged_with_its_reason_and_without_the_key(
    headers: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with otlp_receiver() as receiver:
        receiver.status = 401
        play(TracingArgs(endpoint=receiver.url, sample_rate=1.0))
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "spans not taken" in each)
    assert reason in line
    assert "secret" not in line


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ValueError, match="endpoint must begin with http"):
        TracingArgs(endpoint="localhost:4317")
