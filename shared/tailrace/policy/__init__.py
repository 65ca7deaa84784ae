"""Policy of a run as episodes see it: placed by the scheduler, continued after failures.

`LeaseClient` (in `tailrace.policy.leases`) and `Reporter` (in `tailrace.policy.reporting`) use the
bus; the names exported here are independent of the transport.
"""

from tailrace.policy.activity import Stages
from tailrace.policy.batching import Batcher
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.policy.ports import ServerPlacement

__all__ = ["Batcher", "ContinuingPolicy", "ServerPlacement", "Stages"]
