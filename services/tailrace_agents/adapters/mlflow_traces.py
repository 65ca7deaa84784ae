"""Sampled episodes as traces of MLflow: messages, turns, tool calls, token counts and rewards.

A trace has the spans of this process: of a workflow, whose turns the gateway makes, the episode alone.
MLflow writes each span in a transaction of its own and holds the interpreter meanwhile, so traces are
few: `tracing.mlflow_per_minute`.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config import ConfigError, RunConfig
from tailrace.import_path import load_extra
from tailrace.log import get_logger
from tailrace.tracing import FinishedSpan, Sink
from tailrace.tracing.background import BackgroundQueue
from tailrace_protos.chat import ChatMessage

log = get_logger(__name__)

_CLOSE_S = 8.0
_MAX_OPEN = 1000  # episodes in play; of further ones the oldest loses its turns
_MAX_BURST = 5  # traces
_REMEDY = "check tracing.mlflow: the address of the server, or the folder of the SQLite file"
_TYPES = {"turn": "CHAT_MODEL", "tool": "TOOL", "play": "AGENT"}
_USAGE = "mlflow.chat.tokenUsage"


class EpisodeTraces:
    """Collects the spans of an episode until its play ends, then gives them to a thread."""

    def __init__(self, run: RunConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # the thread is ours
        self._mlflow = load_extra("mlflow", "mlflow", "tracing.mlflow")
        self._exceptions = load_extra("mlflow.exceptions", "mlflow", "tracing.mlflow")
        self._run = run
        self._experiment_id = ""
        self._open: dict[str, list[FinishedSpan]] = {}
        self._pause_s = 60.0 / run.tracing.mlflow_per_minute
        self._earliest_s = 0.0  # monotonic, of the next trace
        self._told = False  # that some are left out
        errors = (self._exceptions.MlflowException, OSError)
        if run.tracing.mlflow.startswith("sqlite:"):
            self._make_database(errors)
        self._queue = BackgroundQueue(
            "mlflow", self.write, errors, _REMEDY, run.tracing.max_queued_spans, _CLOSE_S
        )

    def sink(self) -> Sink:
        """Sink for the spans of this process."""
        return Sink(self.take, self._queue.close)

    def take(self, span: FinishedSpan) -> None:
        """Keeps a span; the one of the play completes its trace."""
        if span.name != "play":
            self._open.setdefault(span.trace_id, []).append(span)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
            return
        spans = self._open.pop(span.trace_id, [])
        if "outcome" in span.attributes:  # otherwise it was handed back, or settled elsewhere
            if self._is_due():
                self._queue.put([span, *spans])
            else:
                self._leave_out()

    def _leave_out(self) -> None:
        self._queue.drop()
        if not self._told:
            self._told = True
            log.info("traces left out", remedy="raise tracing.mlflow_per_minute to have more")

    def _is_due(self) -> bool:
        """Tell whether another trace may be written; a few at once may, if there were none before."""
        now_s = time.monotonic()
        self._earliest_s = max(self._earliest_s, now_s - _MAX_BURST * self._pause_s)
        if self._earliest_s > now_s:
            return False
        self._earliest_s += self._pause_s
        return True

    def write(self, traces: Sequence[list[FinishedSpan]]) -> None:
        """Writes traces; raises MLflow's exceptions."""
        if not self._experiment_id:
            self._open_experiment()
        for play, *spans in traces:
            self._write(play, spans)

    def _make_database(self, errors: tuple[type[Exception], ...]) -> None:
        """Makes the tables before the run: a process that ends meanwhile would leave half of them."""
        uri = self._run.tracing.mlflow
        try:
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self._open_experiment()
        except errors as error:
            raise ConfigError(f"tracing.mlflow: cannot use {uri}: {error}") from error

    def _open_experiment(self) -> None:
        self._mlflow.set_tracking_uri(self._run.tracing.mlflow)
        self._experiment_id = self._mlflow.set_experiment(self._run.exp_name).experiment_id

    def _write(self, play: FinishedSpan, spans: Sequence[FinishedSpan]) -> None:
        known = dict(play.attributes)
        messages: list[ChatMessage] = known.pop("messages")
        conversation = msgspec.to_builtins(messages)
        replies = [at for at, each in enumerate(messages) if each.role == "assistant"]
        start = self._mlflow.start_span_no_context
        root = start(
            "episode",
            span_type=_TYPES["play"],
            inputs={"messages": conversation[: replies[0]] if replies else conversation},
            attributes={**known, _USAGE: _usage(known)},
            tags={name: str(known[name]) for name in ("outcome", "group_id", "phase", "tag")},
            experiment_id=self._experiment_id,
            start_time_ns=play.start_ns,
        )
        turns = [span for span in spans if span.name == "turn"]
        texts = dict(zip(map(id, turns), replies, strict=False)) if len(turns) == len(replies) else {}
        for span in sorted(spans, key=lambda each: each.start_ns):
            self._child(root, span, conversation, texts.get(id(span)))
        root.end(
            outputs={
                "messages": conversation[replies[0] :] if replies else [],
                "reward": known["reward"],
            },
            status="ERROR" if play.error else "OK",
            end_time_ns=play.end_ns,
        )
        self._mlflow.log_feedback(trace_id=root.trace_id, name="reward", value=known["reward"])

    def _child(self, root: Any, span: FinishedSpan, conversation: list[Any], reply: int | None) -> None:
        """Writes a turn, with its prompt and reply where they are known, a tool call, or a stage."""
        known = dict(span.attributes)
        inputs, outputs = known.pop("arguments", None), known.pop("result", None)
        if reply is not None:
            inputs = {"messages": conversation[:reply]}
            outputs = {"messages": conversation[reply : reply + 1]}
        if "num_sampled_tokens" in known:
            known[_USAGE] = _usage(known)
        made = self._mlflow.start_span_no_context(
            span.name,
            span_type=_TYPES.get(span.name.partition(" ")[0], "UNKNOWN"),
            parent_span=root,
            inputs=inputs,
            attributes=known,
            start_time_ns=span.start_ns,
        )
        status = "ERROR" if span.error else "OK"
        made.end(outputs=outputs, status=status, end_time_ns=span.end_ns)


def _usage(known: dict[str, Any]) -> dict[str, int]:
    prompt, sampled = known.get("num_prompt_tokens", 0), known.get("num_sampled_tokens", 0)
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
