"""Judges behind a real HTTP endpoint: what they are asked, how often, and what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import ValidationError, convert

from tailrace.bus import Bus
from tailrace.config import ConfigError
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_reward.adapters import judge as judge_module
from tailrace_reward.adapters.components import open_components
from tailrace_reward.adapters.judge import RunGateway
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tests.world.json_server import json_server

Answer = Callable[[int, dict[str, Any]], web.Response]  # of the how-many-th request and its body


def says(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


class Endpoint:
    """An OpenAI endpoint; keeps what it was asked and how many asked at once."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.num_now = self.num_at_most = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        self.num_now += 1
        self.num_at_most = max(self.num_at_most, self.num_now)
        try:
            body = await request.json()
            self.asked.append((body, request.headers.get("Authorization", "")))
            await asyncio.sleep(0)
            return self.answer(len(self.asked), body)
        finally:
            self.num_now -= 1


@asynccontextmanager
async def endpoint(answer: Answer, kind: type[Endpoint] = Endpoint) -> AsyncIterator[Endpoint]:
    made = kind(answer)
    application = web.Application()
    application.router.add_post("/v1/chat/completions", made.complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield made
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scorer(
    url: str, timeout_s: float = 60.0, gateway: RunGateway | None = None, **judge: Any
) -> AsyncIterator[Scorer]:
    args = {"base_url": url, "model": "wise", "prompt": "{{ question }} -> {{ answer }}", **judge}
    entry = {"name": "quality", "kind": "judge", "judge": args, "timeout_s": timeout_s}
    config = convert({"rewards": [entry]}, RewardConfig)
    components = await open_components(config, "run.yaml", gateway=gateway)
    try:
        yield Scorer(config.components, components.by_name)
    finally:
        await components.close()


def item(answer: str = "4") -> ScoreItem:
    messages = (ChatMessage("user", "2 + 2?"), ChatMessage("assistant", answer))
    return ScoreItem(f"g.{answer}", EnvTask("sums", 0, row={"truth": "4"}), messages, (), {})


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_WAIT_S", 0.001)


async def test_a_judge_is_asked_by_the_template_with_its_key_and_its_number_is_the_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    prompt = "{{ conversation }}\ntruth: {{ row.truth }}"
    async with (
        endpoint(lambda _n, _body: says("Fine. Score: 8.5")) as judge,
        scorer(
            judge.url,
            prompt=prompt,
            api_key_env="JUDGE_KEY",
            system_prompt="Judge.",
            max_tokens=9,
            temperature=0.3,
        ) as made,
    ):
        (score,) = await made.score([item()])
    assert score.reward == 8.5
    assert score.components == {"quality": 8.5}
    ((body, authorization),) = judge.asked
    assert authorization == "Bearer secret"
    assert body == {
        "model": "wise",
        "messages": [
            {"role": "system", "content": "Judge."},
            {"role": "user", "content": "[user]\n2 + 2?\n\n[assistant]\n4\ntruth: 4"},
        ],
        "temperature": 0.3,
        "max_tokens": 9,
    }


async def test_a_judge_elsewhere_is_reached_by_the_proxy_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(url: str, _authorization: str, _body: object) -> tuple[int, object]:
        asked.append(url)
        return 200, {"choices": [{"message": {"role": "assistant", "content": "Score: 1"}}]}

    with json_server(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with scorer("http://judge.example/v1") as made:
            (score,) = await made.score([item()])
    assert score.reward == 1.0
    assert asked == ["http://judge.example/v1/chat/completions"]


def reasons(_number: int, body: dict[str, Any]) -> web.Response:
    """As a model that thinks first: it takes neither of two usual fields."""
    refused = [key for key in ("max_tokens", "temperature") if key in body]
    if refused:
        return web.Response(status=400, text=f"unsupported parameter: {refused[0]}")
    return says("Score: 7")


async def test_fields_that_a_model_refuses_are_left_out_and_its_own_are_sent() -> None:
    async with endpoint(reasons) as judge:
        async with scorer(judge.url) as made:
            (score,) = await made.score([item()])
        assert score.error is not None
        assert "refused with status 400: unsupported parameter: max_tokens" in score.error.reason
        own = {"max_tokens": None, "temperature": None, "max_completion_tokens": 99, "model": "wiser"}
        async with scorer(judge.url, body=own) as made:
            (score,) = await made.score([item()])
    assert score.reward == 7.0
    sent = judge.asked[-1][0]
    assert sent["max_completion_tokens"] == 99
    assert sent["model"] == "wiser"
    assert sent["messages"] == [{"role": "user", "content": "2 + 2? -> 4"}]


@pytest.mark.parametrize("key", ["messages", "stream"])
async def test_what_a_judge_is_asked_and_how_it_is_read_are_not_in_its_body(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"judge\.body: {key} must not be set"):
        async with scorer("http://x", body={key: True}):
            pass


def fails_first(number: int, _body: dict[str, Any]) -> web.Response:
    """Overloaded, then broken, then without a score, then right."""
    if number == 1:
        return web.Response(status=429, headers={"Retry-After": "0"})
    if number == 2:
        return web.Response(text="<html>")
    return says("I cannot tell") if number == 3 else says("Score: 3")


async def test_a_judge_is_asked_again_until_there_is_a_score() -> None:
    async with endpoint(fails_first) as judge, scorer(judge.url) as made:
        (score,) = await made.score([item()])
        assert score.error is None
        assert score.reward == 3.0
        assert len(judge.asked) == 4
        await made.score([item()])
        assert len(judge.asked) == 4, "a repeated request is answered from memory"


@pytest.mark.parametrize(
    ("answer", "num_asked", "reason"),
    [
        (lambda _n, _b: web.Response(status=500, text="broken"), 2, "2 attempts: status 500: broken"),
        (lambda _n, _b: web.Response(status=401, text="no key"), 1, "refused with status 401: no key"),
        (lambda _n, _b: says("Score: 99"), 2, "outside 0 to 10"),
        (lambda _n, _b: web.json_response({"choices": []}), 2, "no chat completion"),
    ],
)
async def test_a_judge_without_a_score_is_a_failure_and_never_a_reward_of_0(
    answer: Answer, num_asked: int, reason: str
) -> None:
    async with endpoint(answer) as judge, scorer(judge.url, max_attempts=2) as made:
        (score,) = await made.score([item()])
        assert score.error is not None
        assert reason in score.error.reason
        assert "quality" in score.error.reason
        assert score.components == {}
        assert len(judge.asked) == num_asked


async def test_nobody_there_and_nobody_answering_are_failures_too() -> None:
    async with endpoint(lambda _n, _b: says("")) as judge:
        gone = judge.url
    async with scorer(gone, max_attempts=2) as made:
        (score,) = await made.score([item()])
    assert score.error is not None
    assert "2 attempts: ClientConnectorError" in score.error.reason

    async with scorer("http://127.0.0.1:9/v1", timeout_s=0.2, max_attempts=10**6) as made:
        (score,) = await made.score([item()])
    assert score.error is not None
    assert "gave no score within 0.2 s" in score.error.reason


async def test_a_gateway_that_is_away_is_asked_again_and_missing_outside_of_a_run(
    bus: Bus, run_name: str
) -> None:
    for gateway, reason in (
        (RunGateway(bus, run_name), "in 2 attempts: no session with the gateway"),
        (None, "only a run has a gateway"),
    ):
        async with scorer("gateway", gateway=gateway, model="", max_attempts=2) as made:
            (score,) = await made.score([item()])
        assert score.error is not None
        assert reason in score.error.reason


async def test_an_attempt_that_hangs_is_given_up() -> None:
    release = asyncio.Event()

    class HangsOnce(Endpoint):
        async def complete(self, request: web.Request) -> web.Response:
            response = await super().complete(request)
            if len(self.asked) == 1:
                await release.wait()
            return response

    async with endpoint(lambda _n, _b: says("Score: 1"), HangsOnce) as judge:
        async with scorer(judge.url, attempt_timeout_s=4.0) as made:
            (score,) = await made.score([item()])
        release.set()
    assert score.reward == 1.0
    assert len(judge.asked) > 1


async def test_no_more_are_asked_at_once_than_allowed() -> None:
    async with (
        endpoint(lambda _n, _b: says("Score: 1")) as judge,
        scorer(judge.url, max_concurrency=3) as made,
    ):
        scores = await made.score([item(str(number)) for number in range(20)])
    assert [score.reward for score in scores] == [1.0] * 20
    assert judge.num_at_most <= 3


async def test_mistakes_in_a_judge_show_at_the_start_or_as_a_failure_of_the_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"api_key_env: the variable NO_SUCH_KEY is not set"):
        async with scorer("http://x", api_key_env="NO_SUCH_KEY"):
            pass
    with pytest.raises(ConfigError, match=r"'quality': judge\.prompt is no template"):
        async with scorer("http://x", prompt="{{ question"):
            pass
    for prompt in ("{{ row.missing }}", "{{ 1 / 0 }}"):
        async with scorer("http://127.0.0.1:9", prompt=prompt) as made:
            (score,) = await made.score([item()])
        assert score.error is not None
        assert "cannot be asked: judge.prompt: " in score.error.reason
