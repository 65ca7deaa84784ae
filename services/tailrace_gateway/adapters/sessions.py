"""Routes under `/v1/sessions`: the session operations of NATS for agents outside the cluster.

The admin key may open sessions and operate on any session. A session key may operate on its own
session, which it may also call `current`.
"""

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tailrace.store.errors import StoreError
from tailrace_gateway.adapters.app import HttpRoute
from tailrace_gateway.adapters.exchange import ADMIN, Exchange
from tailrace_gateway.config import SessionDefaults
from tailrace_gateway.core.body import Body, NumberRanges, read_body, stop_strings
from tailrace_gateway.core.errors import (
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from tailrace_gateway.core.gateway import Gateway
from tailrace_gateway.handlers import SessionHandler
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.generation import SamplingParams
from tailrace_protos.session import (
    ExportSession,
    ExportStyle,
    OpenSession,
    RewardScope,
    SessionLimits,
)
from tailrace_protos.trajectory import TokenRow

_SESSION_ID = re.compile(r"^[A-Za-z0-9_.:-]{1,200}\Z")
_RANGES = NumberRanges(
    max_episode_tokens=(1, 1 << 31),
    max_new_tokens=(1, 1 << 31),
    timeout_s=(1e-3, 1e9),
    temperature=(0, 100),
    top_p=(1e-6, 1),
    top_k=(0, 1 << 30),
    sampling_seed=(-(1 << 63), (1 << 63) - 1),
)
_EXPORT_RANGES = NumberRanges(turn_discount=(0, 1))


class OpenSessionBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions`; `gateway.session_defaults` fills the missing fields."""

    session_id: str = ""
    max_episode_tokens: int | None = None
    max_new_tokens: int | None = None
    timeout_s: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    sampling_seed: int | None = None


class RewardBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions/{id}/reward`; without a completion id it means the last call."""

    reward: float
    completion_id: str = ""


class ExportBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions/{id}/export`; without a style the run's `granularity` decides."""

    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    export_style: ExportStyle | None = None
    turn_discount: float = 1.0
    reward_scope: RewardScope = RewardScope.EPISODE


@dataclass(frozen=True)
class SessionRoutes:
    """Handlers of the session routes."""

    gateway: Gateway
    defaults: SessionDefaults
    base_url: Callable[[], str]
    handler: SessionHandler
    export_style: ExportStyle
    context_tokens: int  # that the model reads; 0: not known

    def routes(self) -> list[HttpRoute]:
        """Return the session routes."""
        one = "/v1/sessions/{session}"
        return [
            HttpRoute("POST", "/v1/sessions", self.open),
            HttpRoute("GET", one, self.show),
            HttpRoute("DELETE", one, self.close),
            HttpRoute("POST", f"{one}/reward", self.reward),
            HttpRoute("POST", f"{one}/export", self.export),
        ]

    async def open(self, exchange: Exchange) -> None:
        """Open a session."""
        exchange.require_admin()
        body = read_body(await exchange.body() or b"{}", OpenSessionBody)
        record = _record(body, self.defaults, self.context_tokens)
        key = await self.gateway.sessions.open(record)
        await exchange.send_json(
            {"session_id": record.episode_id, "base_url": self.base_url(), "api_key": key}, 201
        )

    async def show(self, exchange: Exchange) -> None:
        """Send the limits of a session and its use of them."""
        session_id = _session_id(exchange)
        session = await self.gateway.sessions.load(session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}")
        limits = session.record.limits
        await exchange.send_json(
            {
                "session_id": session_id,
                "is_open": session.is_open,
                "num_sampled_tokens": session.ledger.num_sampled,
                "max_new_tokens": limits.max_new_tokens,
                "max_episode_tokens": limits.max_episode_tokens,
                "deadline_unix_s": limits.deadline_unix_s,
                "metrics": session.ledger.counts(),
            }
        )

    async def reward(self, exchange: Exchange) -> None:
        """Set the reward of one call."""
        session_id = _session_id(exchange)
        body = read_body(await exchange.body(), RewardBody)
        rewarded = await self.gateway.exporter.set_reward(session_id, body.reward, body.completion_id)
        await exchange.send_json({"completion_id": rewarded, "reward": body.reward})

    async def export(self, exchange: Exchange) -> None:
        """Close a session for calls and send its rows as JSON."""
        session_id = _session_id(exchange)
        body = read_body(await exchange.body() or b"{}", ExportBody)
        _EXPORT_RANGES.require(body)
        exported = await self.handler.finish(
            ExportSession(
                session_id,
                body.rewards,
                body.export_style or self.export_style,
                body.turn_discount,
                body.reward_scope,
            )
        )
        await exchange.send_json(
            {
                "session_id": session_id,
                "rows": [_row(row) for row in exported.rows],
                "messages": exported.messages,
                "rewards": exported.rewards,
                "metrics": exported.metrics,
            }
        )

    async def close(self, exchange: Exchange) -> None:
        """Delete a session."""
        session_id = _session_id(exchange)
        try:
            await self.handler.forget(session_id)
        except StoreError as error:
            reason = f"the session cannot be closed now: {error}"
            raise UnavailableError(reason, retry_after_s=1.0) from error
        await exchange.send_json({"session_id": session_id, "closed": True})


def _session_id(exchange: Exchange) -> str:
    wanted = exchange.params["session"]
    if exchange.caller == ADMIN:
        return wanted
    if wanted not in ("current", exchange.caller):
        raise ForbiddenError("this key is another session's")
    return exchange.caller


def _record(body: OpenSessionBody, defaults: SessionDefaults, context_tokens: int) -> OpenSession:
    """Return the record of a session; its conversations are no longer than what the model reads."""
    _RANGES.require(body)
    session_id = body.session_id or f"http-{uuid.uuid4().hex}"
    if not _SESSION_ID.match(session_id):
        reason = "session_id: 1 to 200 letters, digits and any of _ . : -"
        raise BadRequestError(reason, param="session_id")
    timeout_s = defaults.timeout_s if body.timeout_s is None else body.timeout_s
    longest = body.max_episode_tokens or defaults.max_episode_tokens
    limits = SessionLimits(
        min(longest, context_tokens or longest),
        body.max_new_tokens or defaults.max_new_tokens,
        time.time() + timeout_s,
    )
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    return OpenSession(
        session_id, limits, SamplingParams(stop=stop_strings(body.stop), **given), body.sampling_seed
    )


def _row(row: TokenRow) -> dict[str, Any]:
    def numbers(values: np.ndarray[Any, Any]) -> list[Any]:
        return list(values.tolist())

    return {
        "token_ids": numbers(as_int32(row.token_ids)),
        "loss_mask": numbers(as_uint8(row.loss_mask)),
        "inference_logprobs": numbers(as_float32(row.inference_logprobs)),
        "turn_ends": numbers(as_int32(row.turn_ends)),
        "turn_rewards": numbers(as_float32(row.turn_rewards)),
        "turn_returns": numbers(as_float32(row.turn_returns)),
        "reward": row.reward,
        "conversation": row.conversation,
        "has_reward": row.has_reward,
        "row_id": row.row_id,
        "spans": [[span.policy_version, span.source, span.num_tokens] for span in row.spans],
    }
