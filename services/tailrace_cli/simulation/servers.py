"""The simulated servers together: capacity, reports to the scheduler, timeline, sums of their time."""

from tailrace_cli.simulation.engine import SimEngine
from tailrace_cli.simulation.records import SimSettings, Timeline
from tailrace_scheduler.core.streams import events as ev

LONGEST_TIMELINE, SHOWN_ENGINES = 20_000, 64


class SimServers:
    """All engines of a cell by server id. `capacity` is the sum of their speeds."""

    def __init__(self, settings: SimSettings) -> None:
        ids = [f"s{one}" for one in range(settings.servers)]
        self.engines = {one: SimEngine(one, settings.engine) for one in ids}
        for fault in settings.faults:
            engine = self.engines[f"s{fault.server}"]
            engine.slowness, engine.fails = fault.slowness, fault.fails
        self.capacity = sum(1.0 / one.slowness for one in self.engines.values() if not one.fails)
        self.timeline: Timeline = []
        self._releases_prefixes = settings.releases_prefixes
        self._preempted: dict[str, int] = {}

    def report(self, engine: SimEngine, now_s: float) -> ev.ServerReport:
        """Return what a server reports, and count anew from here."""
        model, server_id = engine.model, engine.server_id
        report = ev.ServerReport(
            server_id,
            kv_used_tokens=engine.kv,
            kv_capacity_tokens=model.kv_tokens,
            host_kv_tokens=model.host_kv_tokens,
            num_running=len(engine.running),
            num_waiting=len(engine.waiting),
            step_s=engine.step_s() if engine.running else 0.0,
            recomputed_tokens=engine.recomputed,
            num_preempted=engine.num_preempted - self._preempted.get(server_id, 0),
            max_running=model.max_running,
            policy_version=0,
            releases_prefixes=self._releases_prefixes,
        )
        engine.recomputed = 0
        self._preempted[server_id] = engine.num_preempted
        if server_id == "s0" and len(self.timeline) < LONGEST_TIMELINE:
            self._draw(now_s)
        return report

    def _draw(self, now_s: float) -> None:
        shown = list(self.engines.values())[:SHOWN_ENGINES]
        used = [min((one.kv + one.idle_tokens) / one.model.kv_tokens, 1.0) for one in shown]
        self.timeline.append((now_s, [len(one.running) for one in shown], used))

    def sums(self) -> dict[str, float]:
        """Return the sums over all engines since the begin: seconds at full speed, preemptions."""
        engines = self.engines.values()
        return {
            "decode_s": sum(one.decode_s / one.slowness for one in engines),
            "prefill_s": sum(one.prefill_s / one.slowness for one in engines),
            "reprefill_s": sum(one.reprefill_s / one.slowness for one in engines),
            "preempted": sum(one.num_preempted for one in engines),
        }
