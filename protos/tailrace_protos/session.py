"""Sessions: one episode's conversations with the gateway, and the ledger that is kept of them."""

import enum
from typing import Any

import msgspec

from tailrace_protos.base import Count, Finite, Float32Bytes, Int32Bytes, Message
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import FinishReason, SamplingParams, TokenSpan
from tailrace_protos.subjects import Phase
from tailrace_protos.trajectory import TokenRow


class ExportStyle(enum.StrEnum):
    """Style in which a ledger becomes rows."""

    INDIVIDUAL = "individual"  # one row per model call
    CONCAT = "concat"  # one row per leaf of the message tree; every node is trained once
    STEP = "step"  # one row per model call; those of the last conversation are one line of turns


class RewardScope(enum.StrEnum):
    """Calls that a reward of the whole episode reaches."""

    EPISODE = "episode"  # all, however the agent cuts its conversations
    CONVERSATION = "conversation"  # those of the message tree of the last call
    LAST = "last"  # the last call, and those that it continues


class LedgerNode(Message, frozen=True, tag="ledger_node", omit_defaults=True, gc=False):
    """One model call in a ledger: inserted messages and ids, sampled tokens, reward."""

    completion_id: str
    parent_id: str  # the call that this one continues; empty: a conversation begins here
    messages: tuple[ChatMessage, ...]  # inserted after the parent's reply
    inserted_ids: Int32Bytes  # [o] their tokens, with the prompt for the reply
    token_ids: Int32Bytes  # [t] sampled
    inference_logprobs: Float32Bytes  # [t]
    spans: tuple[TokenSpan, ...]
    finish_reason: FinishReason
    reply: ChatMessage
    reward: Finite | None = None
    tools: tuple[ToolSchema, ...] = ()
    is_rendered_whole: bool = False  # `inserted_ids` are its whole prompt, without the parent's tokens
    is_fork: bool = False  # text of a reply was inserted, or the template changed what stood before
    num_malformed: Count = 0  # tool calls in the reply that could not be read
    is_masked: bool = False  # its tokens are never trained; `mask_reason` says why
    mask_reason: str = ""
    template_args: str = ""  # JSON of template arguments that the call had beyond the run's
    broken_constraint: str = ""  # field of the request, such as `tool_choice`, that the reply violates
    choice: Count = 0  # place among the replies that one request asked for


class RewardSet(Message, frozen=True, tag="reward_set"):
    """A call got a reward, in a session's log."""

    completion_id: str
    reward: Finite


class CallRefused(Message, frozen=True, tag="call_refused"):
    """A call was refused because of the policy's own tokens or reply, in a session's log."""

    code: str  # of the error, such as `context_length_exceeded`


class RecordedAnswer(Message, frozen=True, tag="recorded_answer", omit_defaults=True):
    """Answer of a gateway to one request; the ledger nodes hold its text."""

    completion_id: str
    created_unix_s: int
    node_ids: tuple[str, ...]  # one per choice
    stops_matched: tuple[str | None, ...]  # the stop string that ended each choice
    num_prompt_tokens: Count
    num_cached_tokens: Count = 0
    # One per choice where the request asked for the likeliest tokens of each step, as in `TokenChunk`.
    top_ids: tuple[Int32Bytes, ...] = ()
    top_logprobs: tuple[Float32Bytes, ...] = ()
    num_prompts: Count = 1  # each has the same number of choices


class SessionLimits(msgspec.Struct, frozen=True):
    """Limits of all calls of one session together."""

    max_episode_tokens: Count  # of one conversation, inserted and sampled
    max_new_tokens: Count  # sampled, over all calls
    deadline_unix_s: Finite


class OpenSession(Message, frozen=True, tag="open_session"):
    """Make a session for an episode; opening it again returns the same key and keeps its ledger."""

    episode_id: str
    limits: SessionLimits
    sampling: SamplingParams = SamplingParams()  # where a call does not say
    sampling_seed: int | None = None  # each call has a seed of its own that follows from it


class OutsideOffer(Message, frozen=True, tag="outside_offer"):
    """An episode that waits for an agent outside of the cluster."""

    opening: OpenSession
    group_id: str
    member: Count
    phase: Phase
    tag: str  # name of the data set
    row: dict[str, Any]
    lease_s: Finite  # without a sign of life, after which another agent gets the episode
    timeout_s: Finite  # from its first lease; the deadline in `opening` is replaced then


class OutsideResult(Message, frozen=True, tag="outside_result", omit_defaults=True):
    """End of an episode that an outside agent played.

    `rewards` by completion id, "" is the episode's. With `rows` the agent brings its own trajectory,
    and the calls of its session are not trained.
    """

    outcome: Outcome = Outcome.OK
    reason: str = ""
    rewards: dict[str, Finite] = msgspec.field(default_factory=dict)
    metrics: dict[str, Finite] = msgspec.field(default_factory=dict)
    rows: tuple[TokenRow, ...] = ()
    messages: tuple[ChatMessage, ...] = ()  # of `rows`, for the reward service


class SessionOpened(Message, frozen=True, tag="session_opened"):
    """Address and key of an open session. `base_url` ends with `/v1`."""

    session_id: str
    base_url: str
    api_key: str


class ExportSession(Message, frozen=True, tag="export_session"):
    """Close a session for calls and return its rows.

    `rewards` by completion id. The key "" is the reward of the episode, which reaches the calls of
    `reward_scope`.
    """

    session_id: str
    rewards: dict[str, Finite] = msgspec.field(default_factory=dict)
    export_style: ExportStyle = ExportStyle.INDIVIDUAL
    turn_discount: Finite = 1.0
    reward_scope: RewardScope = RewardScope.EPISODE
    api_key: str = ""  # only the session that this key opens: a later one may have its id; empty: any


class SessionExport(Message, frozen=True, tag="session_export"):
    """The rows of a session and what is to be counted of it.

    What is too big for one message lies encoded under `blob` (`tailrace.store.Blobs`): then only that
    and `metrics` are here.
    """

    rows: tuple[TokenRow, ...] = ()
    blob: str = ""
    messages: tuple[ChatMessage, ...] = ()  # the conversation of the last call, with its reply
    rewards: tuple[Finite, ...] = ()  # those set, in the order of the calls
    metrics: dict[str, Finite] = msgspec.field(default_factory=dict)  # num_calls, num_forks, ...
    refusals: tuple[str, ...] = ()  # codes of calls refused because of the policy's tokens or reply
    faults: tuple[str, ...] = ()  # of replies that nothing continued (`Ledger.faults`)


class CloseSession(Message, frozen=True, tag="close_session"):
    """Forget a session: abort what runs and delete its ledger."""

    session_id: str
    api_key: str = ""  # only the session that this key opens: a later one may have its id; empty: any


class SessionClosed(Message, frozen=True, tag="session_closed"):
    """The session is gone, or takes no more calls."""

    session_id: str
    nonce: str = ""  # which of the sessions that had this id; empty: whichever it is
