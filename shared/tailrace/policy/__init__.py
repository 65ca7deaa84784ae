"""A run's policy as seen from an episode: placed by the scheduler, continued over failures.

`LeaseClient` (in `tailrace.policy.leases`) and `Reporter` (in `tailrace.policy.reporting`) speak over
the bus; everything named here knows no transport.
"""

from tailrace.policy.activity import Stages
from tailrace.policy.batching import Batcher
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.policy.ports import ServerPlacement

__all__ = ["Batcher", "ContinuingPolicy", "ServerPlacement", "Stages"]
