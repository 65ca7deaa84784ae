"""Tools over NATS: workers serve them, clients call them.

| module | content |
|---|---|
| `worker` | `ToolWorker`: a NATS micro service on `tool.<name>` |
| `calls` | calls of a worker: running, finished, leases, cancellation |
| `host` | `ToolHost`: runs the tools' code, and objects of tools; `LocalTools`: without NATS |
| `running` | one call with its timeout and thread |
| `client` | `ToolClient`: calls, redelivery, cancellation |
| `delivery` `watch` | delivery of a call and session affinity; detection of dead workers |
| `episode_tools` | `EpisodeTools`: the tools of one episode, for agent loops |
| `port` `wire` | requests and replies of a caller; JSON, msgpack and claim checks |
| `discovery` | registration of workers, and search for tools |
| `conversion` | arguments from a model, results for a model |
| `serving` `mcp` | the process of a worker; tools of MCP servers |
"""

from tailrace.tools.client import ToolClient
from tailrace.tools.episode_tools import EpisodeTools, ToolsMissingError
from tailrace.tools.host import LocalTools
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
