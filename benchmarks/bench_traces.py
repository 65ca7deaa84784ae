"""Processor time of one traced episode, by receiver: pure code, no run beside it.

`python -m benchmarks.bench_traces` (or `make bench-traces`): an episode of five turns with its
messages, 33 spans in five services. In one process and in turns:

- to record the spans, in the event loops;
- to encode them for OTLP, in threads that send them;
- to send the spans of one process to an OTLP receiver on this machine, encoding included;
- to write the episode to MLflow (sqlite), as whole trace, and, the alternative, span by span with
  `start_span_no_context` and `end`.

`bench_observe` measures what a run loses by all this.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlflow
import msgspec
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from benchmarks.bench_observe import Receiver
from benchmarks.results import Results, median
from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink, otlp
from tailrace_agents.adapters.mlflow_traces import EpisodeTraces
from tailrace_protos.chat import ChatMessage

PACKAGES = ("tailrace", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "mlflow-skinny")
NUM_TURNS, ROUNDS, WARM_ROUNDS = 5, 40, 5
MAX_MLFLOW_SHARE = 0.5  # of the time span by span
_BOARD = "PHFF\nFFFH\nFHFF\nFFFG\n"


def play(episode_id: str) -> None:
    """Record the spans of an episode, as the services do."""
    root, now_s = tracing.episode(episode_id), time.time()
    messages: list[ChatMessage] = []
    with tracing.span("play", root, episode_id=episode_id, attempt=0) as played:
        for turn in range(NUM_TURNS):
            messages += [ChatMessage("user", _BOARD), ChatMessage("assistant", "left")]
            with tracing.span("turn", turn=turn, num_prompt_tokens=40) as made:
                _generate(f"{episode_id}.{turn}.0", now_s)
                made.set(num_sampled_tokens=2)
        with tracing.span("reward"):
            tracing.record("score", root, now_s, now_s, episode_id=episode_id, reward=1.0)
        known = {"outcome": "ok", "group_id": episode_id[:-2], "phase": "train", "reward": 1.0}
        played.set(**known, tag="frozen_lake", num_prompt_tokens=200, num_sampled_tokens=10)
        played.set(messages=messages)
        with tracing.span("settle"):
            pass
    tracing.record("queue", root, now_s, now_s)
    ids = {"episode_id": episode_id, "num_turns": NUM_TURNS, "num_sampled_tokens": 10}
    tracing.record("episode", "", now_s, now_s, traceparent=root, **known, **ids)
    tracing.record("buffer", root, now_s, now_s)
    tracing.record("train", root, now_s, now_s, links=[root], step=3)


def _generate(call_id: str, now_s: float) -> None:
    parent = tracing.current_traceparent()
    counts = {"num_prompt_tokens": 40, "num_cached_tokens": 32, "num_sampled_tokens": 2}
    generate = tracing.record(
        "generate",
        parent,
        now_s,
        now_s,
        call_id=call_id,
        finish_reason="stop",
        policy_version=3,
        **counts,
    )
    for name in ("queue", "prefill", "decode"):
        tracing.record(name, generate, now_s, now_s)


def of_agents(spans: Sequence[FinishedSpan]) -> list[FinishedSpan]:
    """The spans of the agents process, the one of the play first."""
    names = ("play", "turn", "reward", "settle")
    return sorted(
        (each for each in spans if each.name in names), key=lambda each: names.index(each.name)
    )


def write_by_span(experiment_id: str, spans: Sequence[FinishedSpan]) -> None:
    """Write a trace to MLflow with the functions that start and end spans."""
    first, *others = spans
    start = mlflow.start_span_no_context
    known = dict(first.attributes)
    messages = msgspec.to_builtins(known.pop("messages"))
    tags = {name: str(known[name]) for name in ("outcome", "group_id", "phase", "tag")}
    root = start(
        "episode", span_type="AGENT", inputs={"messages": messages[:1]}, attributes=known, tags=tags,
        experiment_id=experiment_id, start_time_ns=first.start_ns,
    )  # fmt: skip
    for at, span in enumerate(others):
        made = start(
            span.name, span_type="CHAT_MODEL", parent_span=root, attributes=dict(span.attributes),
            inputs={"messages": messages[: 2 * at + 1]}, start_time_ns=span.start_ns,
        )  # fmt: skip
        made.end(outputs={"messages": messages[2 * at + 1 : 2 * at + 2]}, end_time_ns=span.end_ns)
    root.end(outputs={"messages": messages[1:], "reward": 1.0}, end_time_ns=first.end_ns)
    mlflow.log_feedback(trace_id=root.trace_id, name="reward", value=1.0)


def median_ms(works: dict[str, Callable[[list[FinishedSpan]], Any]]) -> dict[str, float]:
    """Processor time of this thread for each kind of work on an episode's spans; they take turns."""
    found: list[FinishedSpan] = []
    tracing.add_sink(Sink(found.append, lambda: None))
    taken_s: dict[str, list[float]] = {"record": [], **{name: [] for name in works}}
    for number in range(WARM_ROUNDS + ROUNDS):
        for name, work in [("record", None), *works.items()]:
            found.clear()
            began_s = time.thread_time()
            play(f"t{number:08d}.0" if work is None else f"{name}{number:08d}.0")
            if work is not None:
                spans = list(found)
                began_s = time.thread_time()
                work(spans)
            taken_s[name].append(time.thread_time() - began_s)
    tracing.close()
    return {name: 1e3 * median(each[WARM_ROUNDS:]) for name, each in taken_s.items()}


def measure(folder: Path) -> dict[str, float]:
    """Milliseconds of a core by kind of work."""
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # in the thread that is measured
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = f"sqlite:///{folder}/mlflow.db"
    args = TracingArgs(mlflow=uri, sample_rate=1.0)
    run = RunConfig(exp_name="bench", tracing=args)
    tracing.configure(run, "agents", "a")
    traces = EpisodeTraces(run)
    traces.write([])  # opens the experiment
    experiment_id = mlflow.set_experiment("by span").experiment_id
    receiver = Receiver(hangs=False)
    exporter = OTLPSpanExporter(f"{receiver.url}/v1/traces")
    resource = otlp._resource({"service.name": "tailrace_agents"})

    def readable(spans: Sequence[FinishedSpan]) -> list[Any]:
        return [otlp._readable(span, resource, has_content=True) for span in spans]

    try:
        return median_ms(
            {
                "encode": lambda spans: encode_spans(readable(spans)).SerializeToString(),
                "send": lambda spans: exporter.export(readable(of_agents(spans))),
                "mlflow": lambda spans: traces.write([of_agents(spans)]),
                "mlflow by span": lambda spans: write_by_span(experiment_id, of_agents(spans)),
            }
        )
    finally:
        receiver.close()


def main() -> int:
    """Measure, print, write; exit 1 when a goal is missed."""
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name))
    results = Results("traces", PACKAGES, num_turns=NUM_TURNS, rounds=ROUNDS)
    for work, ms in found.items():
        results.add(work=work, ms_of_a_core=ms)
    share = found["mlflow"] / found["mlflow by span"]
    results.at_most("MLflow: whole traces, share of the time span by span", share, MAX_MLFLOW_SHARE)
    results.show()
    results.write()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
