"""Tools behind NATS: workers that serve them, clients that call them.

| module | holds |
|---|---|
| `worker` | `ToolWorker`: a NATS micro service on `tool.<name>` |
| `client` | `ToolClient`: calls, affinity, redelivery, cancellation |
| `episode_tools` | `EpisodeTools`: the tools of one episode, as agent loops use them |
| `local` | `LocalTools`: the same without NATS, for debugging |
| `host` | running the tools' code: slots, timeouts, sessions, threads |
| `watch` `leases` | who died: workers, seen by callers; callers, seen by workers |
| `wire` | JSON and msgpack, claim checks |
| `discovery` | which tools there are |
"""

from tailrace.tools.client import ToolClient
from tailrace.tools.episode_tools import EpisodeTools
from tailrace.tools.errors import ToolsMissingError
from tailrace.tools.local import LocalTools
from tailrace.tools.watch import ToolDeadlines
from tailrace.tools.worker import ToolWorker
from tailrace_protos.tool import ToolErrorKind, ToolResult

__all__ = [
    "EpisodeTools",
    "LocalTools",
    "ToolClient",
    "ToolDeadlines",
    "ToolErrorKind",
    "ToolResult",
    "ToolWorker",
    "ToolsMissingError",
]
