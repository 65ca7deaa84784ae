"""Cost of HTTP without a gateway: starlette on uvicorn, with the gateway's settings, that says hello.

    python -m benchmarks.gateway.hello PORT

A request that contains `@<seconds>@` is answered after so long, as the engine of the benchmark does.
"""

from __future__ import annotations

import asyncio
import re
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_WAIT = re.compile(rb"@([0-9.]+)@")
_ANSWER = {"id": "x" * 35, "choices": [{"message": {"role": "assistant", "content": "y" * 64}}]}


async def hello(request: Request) -> JSONResponse:
    """Read the JSON of a request, answer with a reply as long as the engine's."""
    raw = await request.body()
    await request.json()
    waits = _WAIT.findall(raw)
    if waits:
        await asyncio.sleep(float(waits[-1]))
    return JSONResponse(_ANSWER)


def main() -> None:
    """Serve until killed."""
    app = Starlette(routes=[Route("/v1/chat/completions", hello, methods=["POST"])])
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )


if __name__ == "__main__":
    main()
