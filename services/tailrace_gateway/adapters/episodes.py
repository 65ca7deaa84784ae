"""Routes under `/v1/episodes`: agents outside of the cluster lease episodes, play and reward them.

The admin key leases an episode. The key of its session, which the lease returns, plays it through the
model's routes and ends it. Here that key is valid until an hour after the episode's end, so that a
repeated reward finds its answer. `{episode}` may be `current` with that key.
"""

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Literal

import msgspec

from tailrace.retry import Backoff
from tailrace.store import OutsideEpisodes
from tailrace.store.errors import StoreError
from tailrace.store.sessions import OutsideLease
from tailrace_gateway.adapters.app import EPISODES, HttpRoute
from tailrace_gateway.adapters.exchange import ADMIN, Exchange
from tailrace_gateway.core.body import Body, NumberRanges, read_body
from tailrace_gateway.core.errors import (
    BadRequestError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    SessionCorruptedError,
    SessionOverError,
    UnauthorizedError,
    UnavailableError,
)
from tailrace_gateway.core.exports import checked_reward
from tailrace_gateway.core.gateway import Gateway
from tailrace_gateway.core.sessions import key_hash
from tailrace_gateway.core.trajectories import RowBody, TrajectoryReader
from tailrace_gateway.handlers import SessionHandler
from tailrace_protos.episode import Outcome
from tailrace_protos.session import OutsideResult

_AGENT = re.compile(r"^[A-Za-z0-9_.:/@-]{1,200}\Z")
_RANGES = NumberRanges(wait_s=(0, 60))
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.2
_Handler = Callable[[Exchange], Coroutine[object, object, None]]


class LeaseBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/episodes`. An agent that asks again under its name gets its episode again."""

    agent: str = ""
    wait_s: float = 0.0
    keep_session: bool = False  # True: the calls of a resumed episode stay; else it begins again


class EndBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/episodes/{episode}/reward`."""

    reward: float | None = None
    rewards: dict[str, float] = msgspec.field(default_factory=dict)  # by completion id
    outcome: Literal["ok", "policy_failure", "infra_failure", "timeout"] = "ok"
    reason: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class TrajectoryBody(EndBody, frozen=True, kw_only=True):
    """Body of `POST /v1/episodes/{episode}/trajectory`."""

    rows: list[RowBody]


@dataclass(frozen=True)
class EpisodeRoutes:
    """Handlers of the episode routes."""

    gateway: Gateway
    episodes: OutsideEpisodes
    handler: SessionHandler
    reader: TrajectoryReader
    base_url: Callable[[], str]

    def routes(self) -> list[HttpRoute]:
        """Return the episode routes."""
        one = f"{EPISODES}/{{episode}}"
        return [
            HttpRoute("POST", EPISODES, self._guarded(self.lease)),
            HttpRoute("GET", one, self._guarded(self.show)),
            HttpRoute("POST", f"{one}/renew", self._guarded(self.renew)),
            HttpRoute("POST", f"{one}/reward", self._guarded(self.reward)),
            HttpRoute("POST", f"{one}/trajectory", self._guarded(self.trajectory)),
        ]

    async def episode_of_key(self, key: str) -> str:
        """Return the episode that a key opens; raise `UnauthorizedError` if there is none."""
        try:
            found = await self.episodes.id_of_key(key_hash(key))
        except StoreError as error:
            raise _unavailable(error) from error
        if not found:
            raise _lost()
        return found

    async def lease(self, exchange: Exchange) -> None:
        """Lease an episode; 204 if none waits within `wait_s`."""
        exchange.require_admin()
        body = read_body(await exchange.body() or b"{}", LeaseBody)
        _RANGES.require(body)
        if body.agent and not _AGENT.match(body.agent):
            reason = "agent: 1 to 200 letters, digits and any of _ . : / @ -"
            raise BadRequestError(reason, param="agent")
        leased = await self._wait(exchange, body.agent or f"lease-{uuid.uuid4().hex}", body.wait_s)
        if leased is None:
            await exchange.send_nothing()
            return
        offer = leased.offer
        limits = msgspec.structs.replace(
            offer.opening.limits, deadline_unix_s=leased.started_unix_s + offer.timeout_s
        )
        episode_id = offer.opening.episode_id
        is_again = leased.is_resumed and not body.keep_session
        if leased.is_used or (is_again and await self._has_calls(episode_id)):
            await self.handler.forget(episode_id)
        key = await self.gateway.sessions.open(msgspec.structs.replace(offer.opening, limits=limits))
        await self.episodes.bind(episode_id, key_hash(key))
        await exchange.send_json(
            {
                "episode_id": episode_id,
                "task": offer.row,
                "tag": offer.tag,
                "phase": offer.phase,
                "group_id": offer.group_id,
                "member": offer.member,
                "base_url": self.base_url(),
                "api_key": key,
                "is_resumed": leased.is_resumed,
                "lease_s": offer.lease_s,
                "deadline_unix_s": limits.deadline_unix_s,
                "max_new_tokens": limits.max_new_tokens,
                "max_episode_tokens": limits.max_episode_tokens,
            }
        )

    async def _wait(self, exchange: Exchange, holder: str, wait_s: float) -> OutsideLease | None:
        """Wait for an episode as long as the client does."""
        loop, backoff = asyncio.get_running_loop(), Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        until_s = loop.time() + wait_s
        gone = asyncio.create_task(exchange.gone())
        try:
            while not gone.done():
                if self.gateway.calls.is_draining:
                    raise UnavailableError("this gateway is stopping: ask again", retry_after_s=0.0)
                leased = await self.episodes.lease(holder)
                if leased is not None or loop.time() >= until_s:
                    return leased
                await backoff.sleep()
            return None
        finally:
            gone.cancel()

    async def _has_calls(self, episode_id: str) -> bool:
        try:
            session = await self.gateway.sessions.load(episode_id)
        except SessionCorruptedError:
            return False  # it is set aside: the episode begins again
        return session is not None and session.num_calls > 0

    async def show(self, exchange: Exchange) -> None:
        """Send the state of an episode."""
        episode_id = _episode_id(exchange)
        found = await self.episodes.state(episode_id)
        if found is None:
            raise _unknown(episode_id)
        state = {"episode_id": episode_id, "state": found.state, "outcome": found.outcome or None}
        await exchange.send_json(state)

    async def renew(self, exchange: Exchange) -> None:
        """Prolong a lease; calls of the model do so by themselves."""
        episode_id = _episode_id(exchange)
        if not await self.episodes.renew(episode_id):
            raise ConflictError(f"episode {episode_id!r} is not leased", code="not_leased")
        await exchange.send_json({"episode_id": episode_id, "state": "leased"})

    async def reward(self, exchange: Exchange) -> None:
        """Settle an episode with its reward, or with a failure."""
        episode_id = _episode_id(exchange)
        body = read_body(await exchange.body(), EndBody)
        rewards = _rewards(body)
        if Outcome(body.outcome).is_valid:
            await self._require_calls(episode_id, rewards)
        await self._settle(exchange, episode_id, _result(body, rewards))

    async def trajectory(self, exchange: Exchange) -> None:
        """Settle an episode with rows that the agent brings."""
        episode_id = _episode_id(exchange)
        body = read_body(await exchange.body(), TrajectoryBody)
        if body.rewards or body.reward is None:
            raise BadRequestError("reward: rows need the episode's reward, one number", param="reward")
        if not Outcome(body.outcome).is_valid:
            reason = f"outcome: rows of an episode with outcome {body.outcome!r} are not trained"
            raise BadRequestError(f"{reason}: send it to .../reward, without them", param="outcome")
        result = _result(body, {"": checked_reward(body.reward)})
        rows, messages = self.reader.read(body.rows, body.reward)
        result = msgspec.structs.replace(result, rows=rows, messages=messages)
        await self._settle(exchange, episode_id, result)

    async def _require_calls(self, episode_id: str, rewards: dict[str, float]) -> None:
        """Tell the agent now, while it can act, that a reward has no call."""
        session = await self.gateway.sessions.load(episode_id)
        if session is None:  # it is over: the settlement tells how
            return
        if not session.num_calls:
            reason = f"episode {episode_id!r} has no model call: nothing can be learnt from it"
            raise ConflictError(reason, code="no_calls")
        for completion_id in rewards:
            if completion_id and not session.has_call(completion_id):
                raise NotFoundError(f"there is no call {completion_id!r} in episode {episode_id!r}")

    async def _settle(self, exchange: Exchange, episode_id: str, result: OutsideResult) -> None:
        own_key = "" if exchange.caller == ADMIN else exchange.key
        answer = await self.episodes.settle(episode_id, result, key_hash(own_key) if own_key else "")
        if answer == "unknown":
            raise _unknown(episode_id)
        if answer == "lost":  # since this request began
            raise _lost()
        if answer == "other":
            reason = f"episode {episode_id!r} was ended before, differently: the first end counts"
            raise ConflictError(reason, code="already_rewarded")
        if answer == "over":
            found = await self.episodes.state(episode_id)
            reason = f"episode {episode_id!r} is over: {found.outcome if found else 'it has expired'}"
            raise SessionOverError(reason, code="episode_over")
        await self.handler.end_calls(episode_id, own_key)  # what comes later has no part in the reward
        repeated = answer == "same"
        state = {"episode_id": episode_id, "state": "rewarded", "is_repeated": repeated}
        await exchange.send_json(state)

    def _guarded(self, handler: _Handler) -> _Handler:
        """Turn failures of Redis into 503, so that clients try again."""

        async def guarded(exchange: Exchange) -> None:
            try:
                await handler(exchange)
            except StoreError as error:
                raise _unavailable(error) from error

        return guarded


def _episode_id(exchange: Exchange) -> str:
    wanted = exchange.params["episode"]
    if exchange.caller == ADMIN:
        return wanted
    if wanted not in ("current", exchange.caller):
        raise ForbiddenError("this key is another episode's")
    return exchange.caller


def _rewards(body: EndBody) -> dict[str, float]:
    """Return the rewards of a valid end; a policy failure without a reward has 0."""
    if not Outcome(body.outcome).is_valid:
        if body.reward is not None or body.rewards:
            reason = f"reward: an episode with outcome {body.outcome!r} has none"
            raise BadRequestError(reason, param="reward")
        return {}
    given = dict(body.rewards)
    if body.reward is not None:
        given[""] = body.reward
    if not given and body.outcome == "ok":
        raise BadRequestError("reward: a number, or rewards by completion id", param="reward")
    return {name: checked_reward(value) for name, value in (given or {"": 0.0}).items()}


def _result(body: EndBody, rewards: dict[str, float]) -> OutsideResult:
    return OutsideResult(Outcome(body.outcome), body.reason, rewards, body.metrics)


def _lost() -> UnauthorizedError:
    return UnauthorizedError("this key opens no episode, or another agent has the episode now")


def _unknown(episode_id: str) -> NotFoundError:
    return NotFoundError(f"there is no episode {episode_id!r}")


def _unavailable(error: StoreError) -> UnavailableError:
    return UnavailableError(f"episodes cannot be read: {error}", retry_after_s=1.0)
