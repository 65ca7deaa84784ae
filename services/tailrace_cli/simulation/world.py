"""The simulated run: workload, engines and learner around the scheduler's own core.

Every event of the core that the services would send is sent, and every decision is carried out.
"""

import math
from collections.abc import Callable
from typing import Any

from tailrace_cli.simulation.engine import SimEngine
from tailrace_cli.simulation.learner import SimLearner
from tailrace_cli.simulation.measures import Tally, summary
from tailrace_cli.simulation.patience import Patience, ideal_s
from tailrace_cli.simulation.records import SimSettings, Timeline
from tailrace_cli.simulation.servers import SimServers
from tailrace_cli.simulation.timetable import Timetable
from tailrace_cli.simulation.workers import FAIL_S, SimWorkers, hooks_of
from tailrace_cli.simulation.workload import Workload
from tailrace_scheduler.core.streaming import REPORT_S
from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.settings import StreamSettings


class World:
    """Runs a cell; `run` returns its measures."""

    def __init__(
        self,
        settings: SimSettings,
        workload: Workload,
        placement: Callable[[Any], Any] | None = None,
    ) -> None:
        self._settings = settings
        self._time = Timetable()
        self._core = StreamCore(_core_settings(settings, workload), placement)
        self._servers = SimServers(settings)
        self._learner = SimLearner(settings, self._servers.capacity)
        self._patience = Patience(settings, ideal_s(settings, self._servers.capacity, workload))
        self._hooks = hooks_of(self._core.book.placement)
        self._workers = SimWorkers(
            settings,
            workload,
            time=self._time,
            core=self._core,
            engines=self._servers.engines,
            learner=self._learner,
            hooks=self._hooks,
            decide=self._decide,
        )
        self._carry_out = self._reactions()
        self._woken_s = math.inf
        self._start_s = 0.0  # of the measured window
        self._end_s = math.inf
        self._measured = self._learner.tally  # of the window
        self._sums: dict[str, float] = {}  # of the engines, at its start; then those of the window

    @property
    def timeline(self) -> Timeline:
        """Times, requests that decode and share of KV in use, of every shown engine."""
        return self._servers.timeline

    def run(self) -> dict[str, Any]:
        """Run until the measured steps are done; raises `StuckRunError` if one cannot be."""
        settings, time, learner = self._settings, self._time, self._learner
        self._tell(ev.AdmissionBounded(1 << 40, 0))
        engines = self._servers.engines.values()
        for number, engine in enumerate(engines):
            self._report(engine)
            time.at(REPORT_S * (1 + number / len(engines)), self._report_again, engine)
        self._decide()
        while self._has_unknown() and time.advance():
            self._patience.check(time.now_s, learner.num_lost)
        self._measured.add_tokens(learner.tally)
        elapsed = self._end_s - self._start_s
        capacity, staleness = self._servers.capacity, settings.max_staleness
        return summary(self._measured, elapsed, capacity, settings.engine, staleness, self._sums)

    def _has_unknown(self) -> bool:
        """Tell whether the window is open, or the learner has not had all groups that began in it."""
        return self._end_s == math.inf or self._workers.first_start_s < self._end_s

    # Scheduler.

    def _tell(self, event: ev.Event) -> None:
        self._core.on(event, self._time.now_s)

    def _reactions(self) -> dict[type, Callable[[Any], None]]:
        """Return how each kind of decision is carried out."""
        workers = self._workers
        return {
            de.AdmitGroups: self._admit,
            de.StartEpisode: workers.start,
            de.ContinueTurn: workers.go_on,
            de.HoldTurn: _nothing,  # the worker waits
            de.CloseGroup: workers.close,
            de.DropGroup: workers.close,
            de.AbortEpisode: _nothing,  # done where the group was closed
            de.ProbeServer: self._probe,
        }

    def _decide(self) -> None:
        now_s = self._time.now_s
        for decision in self._core.decide(now_s):
            self._carry_out[type(decision)](decision)
        self._feed_learner()
        wake_s = self._core.wake_s(now_s)
        if wake_s < self._woken_s - 1e-9 or self._woken_s <= now_s:
            self._woken_s = wake_s
            self._time.at(wake_s, self._wake)

    def _wake(self) -> None:
        if self._time.now_s >= self._woken_s:
            self._woken_s = math.inf
        self._decide()

    def _admit(self, decision: de.AdmitGroups) -> None:
        for _ in range(decision.num_groups):
            self._workers.open_group()
        if decision.num_groups:
            self._decide()

    def _probe(self, decision: de.ProbeServer) -> None:
        self._time.at(self._time.now_s + FAIL_S, self._probed, decision.server_id)

    def _probed(self, server_id: str) -> None:
        fails = self._servers.engines[server_id].fails
        self._tell(ev.CallsReported(server_id, int(fails), int(not fails)))
        self._decide()

    # Learner.

    def _feed_learner(self) -> None:
        slots = self._learner.slots_to_fill(self._core.book.ages.num_ready)
        if not slots:
            return
        if self._settings.closing_order:
            chosen = next(iter(self._workers.closed), "")
        else:
            chosen = next(iter(self._core.select(self._time.now_s, slots)), "")
        if chosen:
            took_s = self._learner.take(self._workers.hand_over(chosen))
            self._time.at(self._time.now_s + took_s, self._trained)

    def _trained(self) -> None:
        if self._learner.trained():
            self._finish_step()
        self._decide()

    def _finish_step(self) -> None:
        for engine in self._servers.engines.values():
            engine.advance(self._time.now_s)
            engine.bump_steps.append(engine.steps)
            if self._settings.recomputes:
                engine.recompute()
            self._workers.reschedule(engine)
        self._hooks.on_step()
        tokens = self._learner.finish_step()
        self._patience.step_done(self._time.now_s)
        self._tell(ev.StepDone(self._learner.version, tokens))
        if self._learner.version == self._settings.warmup_steps:
            self._open_window()
        if self._learner.version == self._settings.warmup_steps + self._settings.steps:
            self._close_window()

    def _open_window(self) -> None:
        """Forget the steps before."""
        self._measured = self._learner.tally = Tally()
        self._start_s, self._sums = self._time.now_s, self._servers.sums()
        for engine in self._servers.engines.values():
            engine.window = (engine.steps, math.inf)

    def _close_window(self) -> None:
        """End the measured steps; the run goes on until their tokens are trained or thrown away."""
        self._measured, self._learner.tally = self._learner.tally, Tally()
        self._end_s, before = self._time.now_s, self._sums
        self._sums = {key: sum_ - before.get(key, 0.0) for key, sum_ in self._servers.sums().items()}
        for engine in self._servers.engines.values():
            engine.window = (engine.window[0], engine.steps)

    # Servers.

    def _report_again(self, engine: SimEngine) -> None:
        self._report(engine)
        self._time.at(self._time.now_s + REPORT_S, self._report_again, engine)
        self._decide()

    def _report(self, engine: SimEngine) -> None:
        engine.advance(self._time.now_s)
        self._workers.reschedule(engine)
        self._tell(self._servers.report(engine, self._time.now_s))


def _nothing(decision: de.Decision) -> None:
    """Nothing is to be simulated."""


def _core_settings(settings: SimSettings, workload: Workload) -> StreamSettings:
    """Return what a real scheduler knows: engines report their sizes, their costs are the defaults."""
    return StreamSettings(
        max_staleness=settings.max_staleness,
        groups_per_step=settings.groups_per_step,
        policy=settings.policy,
        context_limit=workload.context_limit,
    )
