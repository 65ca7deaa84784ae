"""Reports ten times a second: the activity of this process's episodes and its leases.

Reports keep leases alive: the scheduler takes back the leases of a worker that stops reporting.
"""

import asyncio
import time

from tailrace.bus import Bus
from tailrace.policy.activity import Stages
from tailrace.policy.leases import LeaseClient
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity

_INTERVAL_S = 0.1


class Reporter:
    """Reports for one worker; `run` is a loop of its service."""

    def __init__(self, bus: Bus, run: str, worker_id: str, stages: Stages, leases: LeaseClient) -> None:
        self._bus = bus
        self._subject = subjects.activity(run)
        self._worker_id = worker_id
        self._stages = stages
        self._leases = leases

    async def run(self) -> None:
        """Reports until cancelled; call `LeaseClient.report` once more on drain."""
        stages = self._stages
        while True:
            activity = AgentActivity(
                worker_id=self._worker_id,
                num_generating=stages.num_generating,
                num_in_tools=stages.num_in_tools,
                num_in_reward=stages.num_in_reward,
                num_settling=stages.num_settling,
                unix_s=time.time(),
                waiting_groups=tuple(set(stages.unleased.values())),
            )
            await self._bus.publish(self._subject, activity)
            await self._leases.report()
            await asyncio.sleep(_INTERVAL_S)
