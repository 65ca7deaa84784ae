"""An inference server without a model: each reply is a function of the prompt's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.channel import ChunkSink
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan
from tests.world.byte_model import renderer


class ScriptedModel:
    """Answers with `reply(prompt text, request)`; a reply ends its turn unless it fills the budget.

    With `hold` set, calls wait for `release`. `chunk` tokens go out at a time.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.reply: Callable[[str, GenerateRequest], str] = lambda prompt, request: "Hello there."
        self.hold = False
        self.chunk = 1_000_000
        self.num_before_hold = 0  # tokens that go out although calls are held
        self._held: dict[str, tuple[GenerateRequest, ChunkSink]] = {}

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        if self.hold:
            self._held[request.call_id] = (request, sink)
            if self.num_before_hold:
                self._send(request, sink, self._ids(request)[: self.num_before_hold], None)
        else:
            self._answer(request, sink, 0)

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """No context is kept."""

    def abort(self, call_id: str) -> None:
        self.aborted.append(call_id)
        held = self._held.pop(call_id, None)
        if held is not None:
            held[1].send(TokenChunk(call_id, finish_reason=FinishReason.ABORT))

    def release(self) -> None:
        """Answer what is held."""
        self.hold = False
        held, self._held = self._held, {}
        for request, sink in held.values():
            self._answer(request, sink, self.num_before_hold)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def prompt(self, index: int = -1) -> str:
        """The text of a prompt."""
        return text_of(as_int32(self.requests[index].prompt_ids))

    def _answer(self, request: GenerateRequest, sink: ChunkSink, num_sent: int) -> None:
        ids = self._ids(request)
        is_cut = len(ids) > request.max_new_tokens
        reason, stop = (FinishReason.LENGTH, None) if is_cut else self._ending(request)
        ids = ids[num_sent : request.max_new_tokens]
        while len(ids) > self.chunk:
            self._send(request, sink, ids[: self.chunk], None)
            ids = ids[self.chunk :]
        self._send(request, sink, ids, reason, stop)

    def _ids(self, request: GenerateRequest) -> list[int]:
        text = self.reply(text_of(as_int32(request.prompt_ids)), request)
        places = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        if places:
            return [int(i) for i in renderer().encode(text[: min(places)])]
        ids = [int(i) for i in renderer().reply_ids(text)]
        ends = [place for place, one in enumerate(ids, 1) if one in request.sampling.stop_token_ids]
        return ids[: ends[0]] if ends else ids

    def _ending(self, request: GenerateRequest) -> tuple[FinishReason, int | str | None]:
        text = self.reply(text_of(as_int32(request.prompt_ids)), request)
        found = [(text.index(stop), stop) for stop in request.sampling.stop if stop in text]
        return FinishReason.STOP, min(found)[1] if found else self._ids(request)[-1]

    def _send(
        self,
        request: GenerateRequest,
        sink: ChunkSink,
        ids: list[int],
        reason: FinishReason | None,
        stop: int | str | None = None,
    ) -> None:
        spans = (TokenSpan(3, "", len(ids)),) if ids else ()
        logprobs = [-0.25] * len(ids)
        tops = [likely for token_id in ids for likely in tops_of(token_id, request.top_logprobs)]
        sink.send(
            TokenChunk(
                request.call_id,
                pack_int32(ids),
                pack_float32(logprobs),
                spans,
                reason,
                stop,
                top_ids=pack_int32([token_id for token_id, _ in tops]),
                top_logprobs=pack_float32([logprob for _, logprob in tops]),
            )
        )


def tops_of(token_id: int, num_tops: int) -> list[tuple[int, float]]:
    """Likeliest tokens at the position of `token_id`, by the scripted model; without `token_id`."""
    return [((token_id + 1 + place) % 256, -1.0 - place) for place in range(num_tops)]


def text_of(ids: Any) -> str:
    return "".join(map(renderer().token_text, ids.tolist()))
