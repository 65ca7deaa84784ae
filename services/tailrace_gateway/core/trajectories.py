"""Trajectories that agents bring themselves: rows of token ids, or conversations as text.

A row of tokens says which ids are trained (`loss_mask`) and with which log-probabilities they were
sampled. A conversation trains its assistant messages, except those with `weight: 0`. Tokens without
log-probabilities count as sampled by the weights that the learner's step starts with.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.chat import Renderer, TemplateError
from tailrace_gateway.core.body import Body
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.exports import checked_reward
from tailrace_gateway.core.openai_request import InMessage, InTool, conversation_of, read_tools
from tailrace_gateway.core.openai_sampling import MAX_ID
from tailrace_protos.base import PolicyVersion, as_int32, as_uint8, pack_float32, pack_int32, pack_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import GIVEN_VERSION, TokenSpan
from tailrace_protos.trajectory import TokenRow
from tailrace_protos.weights import ModelCard

_LEAST = float(np.finfo(np.float32).min)
_ROUNDING = 1e-3  # by which an engine's log-probability of a certain token may exceed 0
_Span = tuple[PolicyVersion, str, Annotated[int, msgspec.Meta(ge=1)]]


class RowMessage(InMessage, frozen=True):
    """Message of a conversation; `weight` 0: an assistant message that is not trained."""

    weight: float | None = None


class RowBody(Body, frozen=True, kw_only=True):
    """One row: `token_ids` with its arrays, as an export of a session has them, or `messages`."""

    token_ids: list[int] | None = None
    loss_mask: list[int] | None = None  # [T] 1: trained
    inference_logprobs: list[float | None] | None = None  # [T]; read where the mask is 1
    spans: list[_Span] | None = None  # policy version, source, number of trained tokens
    turn_ends: list[int] | None = None
    turn_rewards: list[float] | None = None
    turn_returns: list[float] | None = None
    messages: list[RowMessage] | None = None
    tools: list[InTool] | None = None
    reward: float | None = None  # left out: the episode's
    conversation: Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)] = 0
    has_reward: bool = True
    row_id: str = ""  # of an export; the reader numbers the rows itself


class TrajectoryReader:
    """Reads rows for the run's model; raises `BadRequestError` with the place of a problem."""

    def __init__(self, renderer: Renderer, card: ModelCard) -> None:
        self._renderer = renderer
        self._max_id = card.vocabulary - 1 if card.vocabulary else MAX_ID
        self._max_tokens = card.context_tokens

    def read(
        self, rows: Sequence[RowBody], reward: float
    ) -> tuple[tuple[TokenRow, ...], tuple[ChatMessage, ...]]:
        """Return the rows, and the messages of the last one for the reward service."""
        if not rows:
            raise BadRequestError("rows: at least one is needed", param="rows")
        read: list[TokenRow] = []
        said: tuple[ChatMessage, ...] = ()
        for index, row in enumerate(rows):
            place = f"rows[{index}]"
            if (row.token_ids is None) == (row.messages is None):
                reason = f"{place}: either token_ids or messages"
                raise BadRequestError(reason, param=place)
            own = reward if row.reward is None else checked_reward(row.reward, f"{place}.reward")
            if row.messages is None:
                made = [self._token_row(row, place, own)]
                said = (ChatMessage("assistant", self._renderer.decode(_trained(made[0]))),)
            else:
                made, said = self._text_rows(row, place, own)
            for one in made:
                self._require_room(one, place)
            of_row = {"conversation": row.conversation, "has_reward": row.has_reward}
            read += [msgspec.structs.replace(one, **of_row) for one in made]
        if len(read) == 1:
            return tuple(read), said
        named = (msgspec.structs.replace(row, row_id=str(i)) for i, row in enumerate(read))
        return tuple(named), said

    def _text_rows(
        self, row: RowBody, place: str, reward: float
    ) -> tuple[list[TokenRow], tuple[ChatMessage, ...]]:
        assert row.messages is not None
        messages = conversation_of(row.messages, f"{place}.messages")
        trained = [one.role == "assistant" and one.weight != 0 for one in row.messages]
        if not any(trained):
            reason = f"{place}.messages: no assistant message with a weight other than 0"
            raise BadRequestError(reason, param=f"{place}.messages")
        try:
            found = self._renderer.supervised_rows(messages, read_tools(row.tools), trained)
        except TemplateError as error:
            raise BadRequestError(f"{place}.messages: {error}", param=f"{place}.messages") from error
        made: list[TokenRow] = []
        for ids, mask in found:
            given = np.where(mask == 1, np.float32(np.nan), np.float32(0))
            spans = (TokenSpan(GIVEN_VERSION, "", int(mask.sum())),)
            made.append(_row(ids, mask, given, spans, reward, None, None))
        return made, messages

    def _require_room(self, row: TokenRow, place: str) -> None:
        """Refuse a row that the model cannot read: the learner would leave it out."""
        num_tokens = len(as_int32(row.token_ids))
        reason = f"{num_tokens} tokens, and the model reads {self._max_tokens}"
        _require(not 0 < self._max_tokens < num_tokens, place, reason)

    def _token_row(self, row: RowBody, place: str, reward: float) -> TokenRow:
        assert row.token_ids is not None
        strange = next((one for one in row.token_ids if not 0 <= one <= self._max_id), None)
        reason = f"the model has the ids 0 to {self._max_id}, not {strange}"
        _require(strange is None, f"{place}.token_ids", reason)
        return _token_row(row, place, reward)


def _token_row(row: RowBody, place: str, reward: float) -> TokenRow:
    assert row.token_ids is not None
    num_tokens = len(row.token_ids)
    mask = _of_tokens(row.loss_mask or [], num_tokens, f"{place}.loss_mask")
    is_mask = bool(mask[1:].any()) and set(mask.tolist()) <= {0, 1}
    reason = "0 or 1 for every token, and a 1 after the first token, which nothing predicts"
    _require(is_mask, f"{place}.loss_mask", reason)
    param = f"{place}.inference_logprobs"
    given = _of_tokens(row.inference_logprobs or [None] * num_tokens, num_tokens, param)
    logprobs = np.where(mask == 1, given, 0)
    reason = "a log-probability is above 0, or so low that it is no float32"
    _require(not np.any((logprobs > _ROUNDING) | (logprobs < _LEAST)), param, reason)
    num_trained = int(mask.sum())
    spans = tuple(TokenSpan(*span) for span in row.spans or [(GIVEN_VERSION, "", num_trained)])
    is_covered = sum(span.num_tokens for span in spans) == num_trained
    reason = "their numbers of tokens do not sum to that of the loss_mask"
    _require(is_covered, f"{place}.spans", reason)
    versions = np.repeat([one.policy_version for one in spans], [one.num_tokens for one in spans])
    is_missing = np.isnan(logprobs[mask == 1]) & (versions != GIVEN_VERSION)
    reason = "null for a token that spans names a policy version for: give the number, or no spans"
    _require(not is_missing.any(), param, reason)
    ids = np.array(row.token_ids, np.int32)
    logprobs = logprobs.astype(np.float32)
    made = _row(ids, mask, logprobs, spans, reward, row.turn_ends, row.turn_rewards)
    return _with_returns(made, row.turn_returns or (), f"{place}.turn_returns")


def _with_returns(row: TokenRow, given: "Sequence[float]", param: str) -> TokenRow:
    """Add the returns of the row's turns, if they are given."""
    returns = [checked_reward(one, param) for one in given]
    has_all = len(returns) in (0, len(as_int32(row.turn_ends)))
    _require(has_all, param, "one for each turn, or none")
    return msgspec.structs.replace(row, turn_returns=pack_float32(returns))


def _of_tokens(
    values: "Sequence[float | None]", num_tokens: int, param: str
) -> NDArray[np.float64]:  # [T], NaN where there is no value
    _require(len(values) == num_tokens, param, f"{len(values)} values for {num_tokens} token_ids")
    return np.array([np.nan if one is None else one for one in values], np.float64)


def _require(is_met: bool, param: str, reason: str) -> None:
    if not is_met:
        raise BadRequestError(f"{param}: {reason}", param=param)


def _row(
    ids: NDArray[np.int32],  # [T]
    mask: NDArray[Any],  # [T] 0 or 1
    logprobs: NDArray[np.float32],  # [T]
    spans: tuple[TokenSpan, ...],
    reward: float,
    turn_ends: Sequence[int] | None,
    turn_rewards: Sequence[float] | None,
) -> TokenRow:
    """Make a row; a turn is a stretch of trained tokens unless `turn_ends` says otherwise."""
    ends = list(turn_ends or (np.flatnonzero(np.diff(mask, append=0) == -1) + 1).tolist())
    given = turn_rewards or [0.0] * (len(ends) - 1) + [reward]
    rewards = [checked_reward(one, "rows.turn_rewards") for one in given]
    if len(ends) != len(rewards) or ends != sorted(ends) or not 0 <= ends[0] <= ends[-1] <= len(ids):
        reason = "rows: turn_ends must ascend within the row, with one of turn_rewards each"
        raise BadRequestError(reason, param="rows")
    return TokenRow(
        token_ids=pack_int32(ids),
        loss_mask=pack_uint8(mask.astype(np.uint8)),
        inference_logprobs=pack_float32(logprobs),
        spans=spans,
        turn_ends=pack_int32(ends),
        turn_rewards=pack_float32(rewards),
        reward=reward,
    )


def _trained(row: TokenRow) -> NDArray[np.int32]:
    ids: NDArray[np.int32] = as_int32(row.token_ids)[as_uint8(row.loss_mask) == 1]
    return ids
