"""RollPacker (arXiv 2509.21009): synchronous rounds that postpone the prompts with long replies.

A short round starts 1.25 times the prompts of a batch with 1.25 times the replies each. It keeps the
first replies of a prompt and the first prompts that are complete, and aborts the rest. Aborted prompts
wait until they fill a batch: a long round plays them whole. The replies of a postponed prompt have the
lengths that they had before. Elastic parallelism and streamed training of the paper are left out.
"""

import math
from collections import deque

from msgspec.structs import replace

from tailrace_cli.simulation.records import SimGroup, SimSettings
from tailrace_cli.simulation.workload import EpisodePlan, Workload
from tailrace_cli.simulation.world import World
from tailrace_scheduler.core.streams import decisions as de

SPECULATIVE = 1.25


class TailBatching(World):
    """A simulated run in rounds. The groups of the scheduler's own admission are not opened."""

    def __init__(self, settings: SimSettings, workload: Workload) -> None:
        super().__init__(replace(settings, min_valid=settings.group_size), workload)
        self._postponed: deque[list[EpisodePlan]] = deque()
        self._round: list[SimGroup] = []
        self._has_begun = False

    def _admit(self, decision: de.AdmitGroups) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin_round()

    def _begin_round(self) -> None:
        batch, members = self._settings.groups_per_step, self._settings.group_size
        if len(self._postponed) >= batch:
            plans = [self._postponed.popleft() for _ in range(batch)]
        else:
            members = math.ceil(SPECULATIVE * members)
            plans = [self._workers.draw(members) for _ in range(math.ceil(SPECULATIVE * batch))]
        self._round = [self._workers.open_group(one) for one in plans]
        super()._decide()

    def _decide(self) -> None:
        self._keep_the_first()
        super()._decide()

    def _keep_the_first(self) -> None:
        members = self._settings.group_size
        for group in self._round:
            if len(group.episodes) - group.unsettled >= members and group.unsettled:
                self._workers.cut(group, range(len(group.episodes)))
        late = [one for one in self._round if one.unsettled]
        if late and len(self._round) - len(late) >= self._settings.groups_per_step:
            self._round = []
            for group in late:
                self._postponed.append([one.plan for one in group.episodes[:members]])
                self._workers.cut(group, range(len(group.episodes)))
                self._workers.throw(group)

    def _finish_step(self) -> None:
        super()._finish_step()
        self._begin_round()
