"""Tool calls: what callers and tool workers say to each other, as msgpack or as JSON.

`CallTool` goes to `tool.<name>` (or `<run>.tool.<name>`) and is answered twice on its reply subject:
`ToolAccepted` at once, `ToolResult` when the call is over. All else goes to the worker that accepted,
on `tool_worker.<worker_id>`. Field by field for workers in other languages: `docs/tools.md`.
"""

import enum
from typing import Any

import msgspec

from tailrace_protos.base import Finite, Message


class ToolErrorKind(enum.StrEnum):
    """Kind of an error that the model may read and react to."""

    NONE = ""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    RAISED = "raised"  # the tool's own code failed
    REPORTED = "reported"  # the tool answered that it could not do it
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"  # arguments or result exceed what can be carried


class CallTool(Message, frozen=True, tag="call_tool", omit_defaults=True):
    """Run a tool once. The same `call_id` sent again to the same worker is the same call.

    A stateful tool keeps one object per (`session_id`, `name`): made by the first call, which has
    `opens_session`, from `create_kwargs`. With `lease_s` the caller promises to probe at least that
    often; a worker that hears nothing for so long takes the caller for dead.
    """

    call_id: str
    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    arguments_blob: str = ""  # where `arguments` lie as JSON if they are too big (claim check)
    run: str = ""  # whose payload store the blobs are in
    episode_id: str = ""
    timeout_s: Finite = 0.0  # 0: the tool's own; the smaller one counts
    lease_s: Finite = 0.0  # 0: nobody will probe; the call runs to its end
    session_id: str = ""
    opens_session: bool = False
    create_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class ToolAccepted(Message, frozen=True, tag="tool_accepted", omit_defaults=True):
    """The call will run here. An empty `worker_id`: this worker takes no probe and no cancellation."""

    call_id: str
    worker_id: str = ""
    is_idempotent: bool = False  # may run again elsewhere if this worker dies
    is_stateful: bool = False  # later calls of the session must come to this worker


class ToolResult(Message, frozen=True, tag="tool_result", omit_defaults=True):
    """Result of a tool call.

    `is_error`: the model can read `content` and react. `infra_error` (not empty): nobody can tell
    what the tool would have said, and the episode is an infrastructure failure.
    """

    call_id: str
    name: str
    content: str = ""
    content_blob: str = ""  # where the content lies as UTF-8 if it is too big (claim check)
    is_error: bool = False
    error_kind: ToolErrorKind = ToolErrorKind.NONE
    infra_error: str = ""
    elapsed_s: float = 0.0  # at the worker; as a caller sees it once it has passed the client
    metrics: dict[str, Finite] = msgspec.field(default_factory=dict)


class ProbeTools(Message, frozen=True, tag="probe_tools", omit_defaults=True):
    """To a worker: are these still with you? Renews the leases of calls and sessions."""

    call_ids: tuple[str, ...] = ()
    session_ids: tuple[str, ...] = ()


class ToolsProbed(Message, frozen=True, tag="tools_probed", omit_defaults=True):
    """State of probed calls and sessions: running, finished (call again for the result), alive.

    A call or session that is in none of the lists is lost.
    """

    running: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    session_ids: tuple[str, ...] = ()


class CancelTools(Message, frozen=True, tag="cancel_tools"):
    """Tells a worker to cancel these calls. It sends no answer."""

    call_ids: tuple[str, ...]


class ReleaseToolSession(Message, frozen=True, tag="release_tool_session"):
    """Tells a worker to cancel the session's calls and to release its tools."""

    session_id: str


class ToolSessionReleased(Message, frozen=True, tag="tool_session_released"):
    """The session is gone, also if it never was."""

    session_id: str


WorkerMessage = CallTool | ProbeTools | CancelTools | ReleaseToolSession
CallReply = ToolAccepted | ToolResult
