"""Client of an OpenAI endpoint: each answer that is none of a model is told with its address."""

from __future__ import annotations

import pytest
from aiohttp import web

from tailrace_cli.terminal.wire import Endpoint, EndpointFailedError


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "application/json", '{"choices": ['),
        (200, "text/html", "<html>log in</html>"),
        (404, "application/json", '{"error": "no such model"}'),
    ],
)
async def test_an_answer_that_is_no_model_s_is_told_with_its_address(
    status: int, content_type: str, body: str
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type=content_type)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        with pytest.raises(EndpointFailedError, match=f"^{url}/chat/completions"):
            await Endpoint(url, "m", "k").ask({"messages": []})
    finally:
        await runner.cleanup()
