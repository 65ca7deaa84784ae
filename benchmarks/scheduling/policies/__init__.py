"""Published placement policies, written from their descriptions; `POLICIES` lists them by name.

Each runs in the same simulated cluster as ours. They ignore health, as their originals do, and place
each episode as soon as it is admitted unless they limit what is in flight.
"""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.scheduling.policies.limited import Aimd, PauseShortest
from benchmarks.scheduling.policies.sticky import (
    FewestAssigned,
    LeastInFlight,
    LeastTokens,
    PrefixLoad,
    RoundRobin,
)

POLICIES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "round_robin": RoundRobin,
    "verl_least_in_flight": LeastInFlight,
    "roll_fewest_assigned": FewestAssigned,
    "least_tokens": LeastTokens,
    "production_stack": PrefixLoad,
    "prime_rl_aimd": Aimd,
    "thunder_agent": PauseShortest,
}
