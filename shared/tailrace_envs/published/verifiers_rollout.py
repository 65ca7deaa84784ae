"""Rollout of verifiers that runs until it needs a reply, and waits for it.

One event loop in one thread runs the rollouts of all instances of this process; callers wait in their
own threads. Invariant: at any time a rollout either computes or waits for exactly one reply.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple

from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from tailrace.sdk.env import NUMBER


class FinishedRollout(NamedTuple):
    """Result of a rollout. `text`: last messages of the environment."""

    text: str
    reward: float
    metrics: dict[str, float]


class Rollout:
    """Episode of an environment of verifiers on one row."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self._client = WaitingClient()
        self._env = env
        self._row = row
        self._seen: list[Any] = []  # messages that the model has read or written
        self._task: Future[Any] | None = None

    def begin(self) -> str | FinishedRollout:
        """Runs to the first model call; returns its prompt."""
        self._task = asyncio.run_coroutine_threadsafe(self._run(), event_loop())
        self._task.add_done_callback(lambda _: self._client.asked.put(None))
        return self._next()

    def reply(self, text: str) -> str | FinishedRollout:
        """Answers the model call; returns the prompt of the next one."""
        event_loop().call_soon_threadsafe(self._client.answer, text)
        self._seen.append(("assistant", text))
        return self._next()

    def cancel(self) -> None:
        """Cancels the rollout."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Any:
        return await self._env.run_rollout(self._row, self._client, "tailrace", {})

    def _next(self) -> str | FinishedRollout:
        prompt = self._client.asked.get()
        if prompt is None:
            assert self._task is not None
            return self._finished(self._task.result())
        return self._new(prompt)

    def _new(self, prompt: Sequence[Any]) -> str:
        """Texts of the messages that the model has not read yet."""
        messages = [(message.role, text_of(message.content)) for message in prompt]
        if messages[: len(self._seen)] != self._seen:
            raise RuntimeError(
                "the environment rewrote earlier messages: play it by a workflow through the gateway "
                "(docs/workflows.md, Environments of verifiers)"
            )
        added = messages[len(self._seen) :]
        self._seen = messages
        return "\n\n".join(text for _, text in added)

    def _finished(self, output: Any) -> FinishedRollout:
        if output.get("error"):
            raise RuntimeError(f"the rollout failed: {output['error']}")
        metrics = {
            name: float(value)
            for name, value in (output.get("metrics") or {}).items()
            if isinstance(value, NUMBER)
        }
        added = [*output["prompt"], *(output.get("completion") or ())][len(self._seen) :]
        texts = [text_of(part_of(message, "content")) for message in added]
        return FinishedRollout("\n\n".join(texts), float(output["reward"] or 0.0), metrics)


class WaitingClient(Client):  # type: ignore[misc]  # verifiers is installed in a separate environment
    """Model client for verifiers that gets its replies from `Rollout.reply`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        self._reply: asyncio.Future[str] | None = None
        self._num_replies = 0

    def answer(self, text: str) -> None:
        """Answers the waiting call; runs in the event loop."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(text)

    def setup_client(self, config: object) -> None:
        """Connects to nothing."""

    async def to_native_tool(self, tool: object) -> object:
        """See `Client`; tools are not supported."""
        raise NotImplementedError("the environment offers tools: play it by a workflow")

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """See `Client`."""
        return messages, {}

    async def get_native_response(
        self, prompt: Sequence[Any], model: str, sampling_args: object, tools: object = None, **_: Any
    ) -> str:
        """Hands the prompt out and waits for the reply."""
        self._reply = asyncio.get_running_loop().create_future()
        self.asked.put(prompt)
        return await self._reply

    async def raise_from_native_response(self, response: str) -> None:
        """Accepts every text as a reply."""

    async def from_native_response(self, response: str) -> Response:
        """See `Client`."""
        self._num_replies += 1
        message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
        identity = f"reply-{self._num_replies}"
        return Response(id=identity, created=int(time.time()), model="tailrace", message=message)

    async def close(self) -> None:
        """Closes nothing."""


def text_of(content: Any) -> str:
    """Text of a message; `TypeError` if it contains other parts."""
    if isinstance(content, str):
        return content
    kinds = {part_of(part, "type") for part in content or ()}
    if kinds - {"text"}:
        raise TypeError(f"messages must be text, found {', '.join(sorted(map(str, kinds)))}")
    return "".join(part_of(part, "text") for part in content or ())


def part_of(message: Any, name: str) -> Any:
    """Field of a message; verifiers has messages as objects and as mappings."""
    return message.get(name) if isinstance(message, dict) else getattr(message, name)


def event_loop() -> asyncio.AbstractEventLoop:
    """Event loop of all rollouts of this process."""
    with _starting:
        return _started_loop()


_starting = threading.Lock()  # `cache` alone lets threads that come at the same time start one each


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop
