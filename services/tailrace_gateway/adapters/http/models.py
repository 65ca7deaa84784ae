"""`GET /v1/models` and `GET /v1/models/{id}`: the one model of the run, under its name.

Requests may name any model: agents often have a name built in, and there is only one.
"""

from __future__ import annotations

from typing import Any

from tailrace_gateway.adapters.http.exchange import Exchange
from tailrace_gateway.adapters.http.routes import HttpRoute
from tailrace_gateway.core.errors import NotFoundError

_CREATED = "1970-01-01T00:00:00Z"


class Models:
    """Describes the model."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def all(self, exchange: Exchange) -> None:
        """The list."""
        model = self._model(exchange)
        told: dict[str, Any] = {"object": "list", "data": [model]}
        if exchange.speaks_anthropic:
            told = {"data": [model], "has_more": False, "first_id": self._name, "last_id": self._name}
        await exchange.answer(told)

    async def one(self, exchange: Exchange) -> None:
        """One of the list."""
        wanted = exchange.params["model"]
        if wanted != self._name:
            raise NotFoundError(
                f"there is no model {wanted!r}, only {self._name!r}", code="model_not_found"
            )
        await exchange.answer(self._model(exchange))

    def _model(self, exchange: Exchange) -> dict[str, Any]:
        if exchange.speaks_anthropic:
            return {
                "type": "model",
                "id": self._name,
                "display_name": self._name,
                "created_at": _CREATED,
            }
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "tailrace"}


def model_routes(name: str) -> list[HttpRoute]:
    """The routes of models."""
    models = Models(name)
    return [
        HttpRoute("GET", "/v1/models", models.all),
        HttpRoute("GET", "/v1/models/{model:path}", models.one),
    ]
