"""Policy of a run as episodes see it: placed by the scheduler, continued after failures.

`LeaseClient` and `Reporter` (in `tailrace.policy.leases`) use the bus; the names exported here are
independent of the transport.
"""

from tailrace.policy.activity import Stages
from tailrace.policy.batching import Batcher
from tailrace.policy.continuation import ContinuingPolicy, ServerPlacement

__all__ = ["Batcher", "ContinuingPolicy", "ServerPlacement", "Stages"]
