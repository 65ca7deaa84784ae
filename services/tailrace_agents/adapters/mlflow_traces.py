"""Sampled episodes as traces of MLflow: messages, turns, tool calls, token counts and rewards.

A trace has the spans of this process: of a workflow, whose turns the gateway makes, the episode alone.
Finished traces go to MLflow's store whole: its functions that start and end spans write each span in
transactions of its own, which takes three times as long or more, and send the spans elsewhere if an
OTLP receiver is in the environment. MLflow holds the interpreter while it writes, so traces are few:
`tracing.mlflow_per_minute`. A turn has the messages since the reply before: with all earlier ones, a
trace would grow with the square of its turns.
"""

import os
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.config import ConfigError, RunConfig
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_extra
from tailrace.log import get_logger
from tailrace.sqlite_files import made_by_one
from tailrace.tracing import FinishedSpan, Sink
from tailrace.tracing.background import BackgroundQueue
from tailrace_protos.base import encode_json
from tailrace_protos.chat import ChatMessage

log = get_logger(__name__)

_CLOSE_S = 8.0
_MAX_OPEN = 1000  # episodes in play; of further ones the oldest loses its turns
_MAX_BURST = 5  # traces
_MAX_PREVIEW = 1000  # characters
_REMEDY = "check tracing.mlflow: the address of the server, or the folder of the SQLite file"
_TYPES = {"turn": "CHAT_MODEL", "tool": "TOOL", "play": "AGENT"}
_TAGS = ("outcome", "group_id", "phase", "tag")
_USAGE = "mlflow.chat.tokenUsage"
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # its own 120 s and 7 attempts tell of a failure after minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_SCHEMA = {"mlflow.trace_schema.version": "3"}


class EpisodeTraces:
    """Collects the spans of an episode until its play ends, then gives them to a thread."""

    def __init__(self, run: RunConfig) -> None:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        self._mlflow = load_extra("mlflow", "mlflow", "tracing.mlflow")
        self._entities = load_extra("mlflow.entities", "mlflow", "tracing.mlflow")
        self._clients = load_extra("mlflow.tracing.client", "mlflow", "tracing.mlflow")
        self._run = run
        self._store: Any = None
        self._experiment_id = ""
        self._open: dict[str, list[FinishedSpan]] = {}
        self._pause_s = 60.0 / run.tracing.mlflow_per_minute
        self._earliest_s = 0.0  # monotonic, of the next trace
        self._told = False  # that some are left out
        if run.tracing.mlflow.startswith("sqlite:"):
            self._make_database()
        # One at a time: a trace that is refused takes no other with it.
        self._queue = BackgroundQueue(
            "mlflow",
            self.write,
            (ForeignCodeError,),
            _REMEDY,
            run.tracing.max_queued_spans,
            _CLOSE_S,
            max_batch=1,
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
        """Writes traces; raises `ForeignCodeError` for what MLflow raises.

        Its packages have exceptions of their own; an old server, or a folder of files, takes no spans.
        """
        with foreign_code("mlflow"):
            if not self._experiment_id:
                self._open_experiment()
            for play, *spans in traces:
                self._write(play, spans)

    def _make_database(self) -> None:
        """Makes the tables before the run: a process that ends meanwhile would leave half of them."""
        uri = self._run.tracing.mlflow
        try:
            with foreign_code("mlflow"), made_by_one(uri):
                self._open_experiment()
        except ForeignCodeError as error:
            raise ConfigError(f"tracing.mlflow: cannot use {uri}: {error.error}") from error

    def _open_experiment(self) -> None:
        self._mlflow.set_tracking_uri(self._run.tracing.mlflow)
        self._store = self._clients.TracingClient(self._run.tracing.mlflow)
        self._experiment_id = self._mlflow.set_experiment(self._run.exp_name).experiment_id

    def _write(self, play: FinishedSpan, spans: Sequence[FinishedSpan]) -> None:
        known = dict(play.attributes)
        messages: list[ChatMessage] = known.pop("messages")
        conversation = msgspec.to_builtins(messages)
        replies = [at for at, each in enumerate(messages) if each.role == "assistant"]
        first = replies[0] if replies else len(messages)
        outputs = {"messages": conversation[first:], "reward": known["reward"]}
        root = msgspec.structs.replace(play, name="episode", parent="")
        given = {"messages": conversation[:first]}
        made = [self._span(root, _TYPES["play"], known | {_USAGE: _usage(known)}, given, outputs)]
        turns = [span for span in spans if span.name == "turn"]
        places = zip([0, *(reply + 1 for reply in replies)], replies, strict=False)
        texts = dict(zip(map(id, turns), places, strict=False)) if len(turns) == len(replies) else {}
        made += (
            self._child(span, conversation, texts.get(id(span)))
            for span in sorted(spans, key=lambda each: each.start_ns)
        )
        self._store.start_trace(self._info(play, messages, first))
        self._store.log_spans(self._experiment_id, made)

    def _info(self, play: FinishedSpan, messages: Sequence[ChatMessage], first: int) -> Any:
        """Entry of the list of traces; `first`: place of the first reply."""
        of, known, name = self._entities, play.attributes, _name(play)
        return of.TraceInfo(
            trace_id=name,
            trace_location=of.TraceLocation.from_experiment_id(self._experiment_id),
            request_time=play.start_ns // 1_000_000,
            execution_duration=(play.end_ns - play.start_ns) // 1_000_000,
            state=of.TraceState.ERROR if play.error else of.TraceState.OK,
            request_preview=_preview(messages[:first]),
            response_preview=_preview(messages[first:]),
            tags={tag: str(known[tag]) for tag in _TAGS},
            trace_metadata=dict(_SCHEMA),
            assessments=[of.Feedback(name="reward", value=known["reward"], trace_id=name)],
        )

    def _child(self, span: FinishedSpan, conversation: list[Any], place: tuple[int, int] | None) -> Any:
        """Makes a turn, with its new messages and its reply where they are known (`place`: of the first
        new message, and of the reply), a tool call, or a stage."""
        known = dict(span.attributes)
        inputs, outputs = known.pop("arguments", None), known.pop("result", None)
        if place is not None:
            begin, reply = place
            inputs = {"messages": conversation[begin:reply]}
            outputs = {"messages": conversation[reply : reply + 1]}
        if "num_sampled_tokens" in known:
            known[_USAGE] = _usage(known)
        kind = _TYPES.get(span.name.partition(" ")[0], "UNKNOWN")
        return self._span(span, kind, known, inputs, outputs)

    def _span(
        self, span: FinishedSpan, kind: str, known: dict[str, Any], inputs: Any, outputs: Any
    ) -> Any:
        attributes = {"mlflow.traceRequestId": _name(span), "mlflow.spanType": kind} | known
        if inputs is not None:
            attributes["mlflow.spanInputs"] = inputs
        if outputs is not None:
            attributes["mlflow.spanOutputs"] = outputs
        code = "STATUS_CODE_ERROR" if span.error else "STATUS_CODE_OK"
        content = {
            "trace_id": _base64(span.trace_id),
            "span_id": _base64(span.traceparent[36:52]),
            "parent_span_id": _base64(span.parent[36:52]),
            "name": span.name,
            "start_time_unix_nano": span.start_ns,
            "end_time_unix_nano": span.end_ns,
            "status": {"code": code, "message": span.error},
            "attributes": {key: encode_json(value).decode() for key, value in attributes.items()},
        }
        return self._entities.Span.from_dict(content)


def _name(span: FinishedSpan) -> str:
    return f"tr-{span.trace_id}"


def _base64(digits: str) -> str:
    return b64encode(bytes.fromhex(digits)).decode()


def _preview(messages: Sequence[ChatMessage]) -> str:
    return (messages[-1].content or "")[:_MAX_PREVIEW] if messages else ""


def _usage(known: dict[str, Any]) -> dict[str, int]:
    prompt, sampled = known.get("num_prompt_tokens", 0), known.get("num_sampled_tokens", 0)
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
