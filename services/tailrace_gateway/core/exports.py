"""Rewards and exports of sessions: training rows from a ledger."""

import uuid

from tailrace.store.errors import StoreError
from tailrace_gateway import metrics
from tailrace_gateway.core.errors import (
    BadRequestError,
    NotFoundError,
    SessionOverError,
    UnavailableError,
)
from tailrace_gateway.core.session import Session
from tailrace_gateway.core.sessions import Sessions, key_hash
from tailrace_gateway.ports import SessionStore
from tailrace_protos.base import encode
from tailrace_protos.session import ExportSession, RewardSet, SessionExport
from tailrace_protos.trajectory import MAX_REWARD

_RETRY_AFTER_S = 1.0


class Exporter:
    """Sets rewards and exports rows."""

    def __init__(self, sessions: Sessions, store: SessionStore) -> None:
        self._sessions = sessions
        self._store = store

    async def set_reward(self, session_id: str, reward: float, completion_id: str = "") -> str:
        """Set the reward of a call (empty id: the last one); return the call's id."""
        session, _ = await self._sessions.refresh(session_id)
        entry = RewardSet(_call_id(session, completion_id), checked_reward(reward))
        try:
            length = await self._store.append(
                session_id, session.nonce, uuid.uuid4().hex, [encode(entry)]
            )
        except StoreError as error:
            reason = f"the reward cannot be kept: {error}"
            raise UnavailableError(reason, retry_after_s=_RETRY_AFTER_S) from error
        if length < 0:
            raise SessionOverError(f"the session {session_id!r} is over: export it with its rewards")
        session.take(entry)
        session.appended(1, length)
        return entry.completion_id

    async def export(self, request: ExportSession) -> tuple[str, SessionExport]:
        """Close a session for calls; return its nonce and its rows. Repeated exports return the same
        rows."""
        session_id, key = request.session_id, request.api_key
        rewards = {name: checked_reward(reward) for name, reward in request.rewards.items()}
        try:
            is_there = await self._store.finish(session_id, key_hash(key) if key else "")
        except StoreError as error:
            reason = f"the session cannot be read: {error}"
            raise UnavailableError(reason, retry_after_s=_RETRY_AFTER_S) from error
        session = await self._sessions.load(session_id) if is_there else None
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}: it was closed or has expired")
        own = [RewardSet(_call_id(session, name), rewards[name]) for name in rewards if name]
        for entry in own:  # all or none
            session.take(entry)
        ledger = session.ledger
        ledger.reward = rewards.get("")  # an earlier export may have given one
        rows = ledger.rows(request.export_style, request.turn_discount, request.reward_scope)
        metrics.EXPORTED_ROWS.inc(len(rows))
        return session.nonce, SessionExport(
            rows=rows,
            messages=tuple(ledger.messages()) if session.num_calls else (),
            rewards=tuple(reward for reward in ledger.rewards if reward is not None),
            metrics=dict(ledger.counts()),
            refusals=tuple(sorted(session.refusals)),
            faults=ledger.faults,
        )


def _call_id(session: Session, completion_id: str) -> str:
    found = completion_id or session.last_call_id
    if not found:
        raise NotFoundError(f"the session {session.session_id!r} has no call to reward")
    if not session.has_call(found):
        raise NotFoundError(f"there is no call {completion_id!r} in session {session.session_id!r}")
    return found


def checked_reward(reward: float, param: str = "reward") -> float:
    """Return the reward; raise `BadRequestError` unless the learner can use it."""
    if not abs(reward) <= MAX_REWARD:  # True for NaN too
        reason = f"{param}: {reward} is not a number between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        raise BadRequestError(reason, param=param)
    return float(reward)
