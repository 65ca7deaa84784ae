"""A judge behind an OpenAI endpoint, over aiohttp: any URL, or the run's own gateway."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import jinja2
import jinja2.meta
import jinja2.sandbox

from tailrace.bus import Bus, BusError
from tailrace.config import ConfigError
from tailrace.config.suggestions import not_one_of
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.proxy import proxy_for
from tailrace.retry import Backoff
from tailrace_protos import subjects
from tailrace_protos.generation import SamplingParams
from tailrace_protos.reward import ScoreItem
from tailrace_protos.session import (
    CloseSession,
    OpenSession,
    SessionClosed,
    SessionLimits,
    SessionOpened,
)
from tailrace_reward import metrics
from tailrace_reward.config import JudgeArgs
from tailrace_reward.config_models import GATEWAY
from tailrace_reward.core.judging import TEMPLATE_NAMES, NoScoreError, read_score, template_names
from tailrace_reward.ports import ComponentFailedError

log = get_logger(__name__)

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MAX_WAIT_S = 30.0
_FIRST_WAIT_S = 0.5
_SESSION_S = 10.0  # to open or close one
_NO_LIMIT = (1 << 31) - 1  # the engine has its own


class _PassingError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s  # that the endpoint asks for


class RunGateway:
    """Sessions with the gateway of this run, one for each attempt.

    They belong to no episode: their tokens are neither counted nor trained. The session's deadline
    ends a call whose judge has died.
    """

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def session(self, args: JudgeArgs, episode_id: str) -> AsyncIterator[SessionOpened]:
        """Open a session with a key of its own for the block; raises `_PassingError`."""
        deadline_unix_s = time.time() + args.attempt_timeout_s + _SESSION_S
        request = OpenSession(
            f"judge-{uuid.uuid4().hex}-{episode_id}",
            SessionLimits(_NO_LIMIT, args.max_tokens, deadline_unix_s),
            SamplingParams(temperature=args.temperature),
        )
        subject = subjects.gateway_open(self._run)
        try:
            opened = await self._bus.request(subject, request, SessionOpened, timeout_s=_SESSION_S)
        except BusError as error:
            raise _PassingError(f"no session with the gateway: {error}") from error
        try:
            yield opened
        finally:
            closing = asyncio.create_task(self._close(opened))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until every session is closed, or given up."""
        await asyncio.gather(*self._closing)

    async def _close(self, opened: SessionOpened) -> None:
        request = CloseSession(opened.session_id, opened.api_key)
        subject = subjects.gateway_close(self._run)
        with suppress(BusError):  # it ends by itself at its deadline
            await self._bus.request(subject, request, SessionClosed, timeout_s=_SESSION_S)


class Judge:
    """`Component` that asks a language model; close it.

    `gateway` is that of the run, for `base_url: gateway`. Raises `ConfigError` for a prompt that is no
    template.
    """

    def __init__(
        self,
        name: str,
        args: JudgeArgs,
        timeout_s: float,
        api_key: str = "",
        gateway: RunGateway | None = None,
    ) -> None:
        self._name = name
        self._args = args
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._gateway = gateway
        self._free = asyncio.Semaphore(args.max_concurrency)
        self._session: aiohttp.ClientSession | None = None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(args.prompt))
            self._prompt = environment.from_string(args.prompt)
        except jinja2.TemplateError as error:
            raise ConfigError(f"reward {name!r}: judge.prompt is no template: {error}") from error
        if unknown := sorted(used - TEMPLATE_NAMES):
            raise ConfigError(
                f"reward {name!r}: judge.prompt: {not_one_of(repr(unknown[0]), TEMPLATE_NAMES)}"
            )

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        body = self._body(item)
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask_until_answered(body, item.episode_id)
            except TimeoutError as error:
                raise self._failure(f"gave no score within {self._timeout_s:g} s") from error

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    def prompt_for(self, item: ScoreItem) -> str:
        """Text of the request; `ComponentFailedError` if the template cannot be filled in."""
        try:
            with foreign_code("judge.prompt"):
                return self._prompt.render(template_names(item))
        except ForeignCodeError as error:
            raise self._failure(f"cannot be asked: judge.prompt: {error.error}") from error

    def _body(self, item: ScoreItem) -> dict[str, Any]:
        args, prompt = self._args, self.prompt_for(item)
        told = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        body = {
            "model": args.model or "policy",
            "messages": [*told, {"role": "user", "content": prompt}],
            "temperature": args.temperature,
            "max_tokens": args.max_tokens,
            **args.body,
        }
        return {key: value for key, value in body.items() if value is not None}

    async def _ask_until_answered(self, body: dict[str, Any], episode_id: str) -> float:
        backoff = Backoff(_FIRST_WAIT_S, _MAX_WAIT_S)
        for attempt in range(1, self._args.max_attempts + 1):
            try:
                return read_score(await self._ask(body, episode_id), self._args)
            except NoScoreError as error:
                reason, asked_wait_s = str(error), 0.0
                if self._args.base_url == GATEWAY and body.get("temperature") == 0:
                    raise self._failure(f"gave no score: {reason}") from error
            except _PassingError as error:
                reason, asked_wait_s = str(error), error.wait_s
            metrics.JUDGE_RETRIES.labels(self._name).inc()
            log.info("judge asked again", judge=self._name, episode_id=episode_id, reason=reason)
            if attempt < self._args.max_attempts:
                await asyncio.sleep(max(backoff.next_s(), asked_wait_s))
        raise self._failure(f"gave no score in {self._args.max_attempts} attempts: {reason}")

    async def _ask(self, body: dict[str, Any], episode_id: str) -> str:
        """Its reply; raises `_PassingError`, and `ComponentFailedError` where asking again is vain."""
        if self._args.base_url != GATEWAY:
            return await self._ask_at(self._args.base_url, self._api_key, body)
        if self._gateway is None:
            raise self._failure("cannot be asked: only a run has a gateway")
        async with self._gateway.session(self._args, episode_id) as opened:
            return await self._ask_at(opened.base_url, opened.api_key, body)

    async def _ask_at(self, base_url: str, api_key: str, body: dict[str, Any]) -> str:
        url = f"{base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=self._args.attempt_timeout_s)
        try:
            posted = self._open().post(
                url, json=body, headers=headers, timeout=timeout, proxy=proxy_for(url)
            )
            async with posted as response:
                text = await response.text()
                if response.status in _RETRIED:
                    wait_s = _seconds(response.headers.get("Retry-After", ""))
                    raise _PassingError(f"status {response.status}: {text[:200]}", wait_s)
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from error
        if response.status >= 400:
            raise self._failure(f"refused with status {response.status}: {text[:200]}")
        return _content(text)

    def _open(self) -> aiohttp.ClientSession:
        """One session for all requests; made in the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _failure(self, reason: str) -> ComponentFailedError:
        return ComponentFailedError(f"judge {self._name!r} ({self._args.base_url})", reason)


def _content(text: str) -> str:
    """The text of the first choice; another shape may be a passing fault of a proxy."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise _PassingError(f"no chat completion: {text[:200]!r}") from error
    return str(content or "")


def _seconds(retry_after: str) -> float:
    """0 for dates, which are rare, and nonsense."""
    return min(float(retry_after), _MAX_WAIT_S) if retry_after.isdecimal() else 0.0
