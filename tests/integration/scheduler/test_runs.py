"""Whole runs of the real scheduler process with real NATS and Redis, fake everything else."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tailrace_protos import subjects
from tailrace_protos.control import EpisodesStopped
from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_scheduler.core.run_log import METRIC_KEYS
from tests.audit import build_ledger, check_ledger
from tests.integration.scheduler.conftest import MakeRun
from tests.integration.scheduler.fakes import FakeRun
from tests.world.servers import ServerProcess


async def test_a_run_of_three_steps_ends_by_itself_with_a_row_for_every_step(make_run: MakeRun) -> None:
    async with make_run() as run:
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()

        check_ledger(build_ledger(run.run_dir))
        rows = run.rows
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(set(row) >= set(METRIC_KEYS) for row in rows)
        assert [row["eval/success_rate"] is not None for row in rows] == [True, False, True, True]
        assert [row["policy_version"] for row in rows] == [0, 1, 2, 3]
        assert rows[0]["loss"] is None
        assert rows[1]["loss"] == 0.5
        assert sum(row["outcome/ok"] for row in rows) == 3 * 4 * 3
        times = [0.0, *(row["time_s"] for row in rows)]
        for row, before_s in zip(rows, times, strict=False):
            accounts = [row[key] for key in row if key.startswith(("idle/", "busy/"))]
            assert sum(accounts) == pytest.approx(row["time_s"] - before_s, abs=1e-6)
        assert run.bodies("run_finished")[0]["step"] == 3
        assert await run.announced() == [line["seq"] for line in run.lines]
        assert run.scheduler.stop(60) == 0


async def test_the_first_and_last_evaluation_are_whole_and_stand_alone(make_run: MakeRun) -> None:
    async with make_run() as run:
        run.learner.apply_after_s = 0.3
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()

        played = [(body["step"], body["num_episodes"]) for body in run.bodies("evaluation_started")]
        assert played == [(0, 6), (2, 3), (3, 6)]
        kinds = [
            (line["body"]["type"], line["body"].get("phase"), line["body"].get("step"))
            for line in run.lines
        ]
        first_train = next(i for i, kind in enumerate(kinds) if kind[:2] == ("group_admitted", "train"))
        assert kinds.index(("evaluation_finished", None, 0)) < first_train
        last_train = max(i for i, kind in enumerate(kinds) if kind[:2] == ("group_closed", "train"))
        assert kinds.index(("evaluation_started", None, 3)) > last_train
        seeds = sorted(
            task.task.seed for name, task in run.agents.tasks.items() if name.startswith("e3-")
        )
        assert seeds == [0, 1, 2, 3, 4, 5]
        assert run.rows[0]["eval/success_rate"] == pytest.approx(2 / 6)


async def test_synchronous_training_admits_nothing_before_the_newest_version_is_served(
    make_run: MakeRun,
) -> None:
    async with make_run(max_staleness=0, max_steps=2, eval_steps=0) as run:
        run.learner.apply_after_s = 0.2
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()

        admitted = [body for body in run.bodies("group_admitted") if body["phase"] == "train"]
        assert Counter(body["step"] for body in admitted) == {0: 4, 1: 4}
        lines = run.lines
        published = next(
            line["unix_s"]
            for line in lines
            if line["body"]["type"] == "weights_published" and line["body"]["optimizer_step"] == 1
        )
        of_step_1 = [
            line["unix_s"]
            for line in lines
            if line["body"]["type"] == "group_admitted"
            and line["body"]["step"] == 1
            and line["body"]["phase"] == "train"
        ]
        assert min(of_step_1) >= published + 0.2


async def test_a_scheduler_killed_again_and_again_loses_and_doubles_nothing(make_run: MakeRun) -> None:
    async with make_run(max_steps=6) as run:
        await run.learner.begin()
        run.go(run.learner.train())
        for step in (0, 1, 3):
            await run.until(lambda step=step: run.learner.step >= step and bool(run.agents.played))
            run.scheduler.kill()
            run.scheduler.start()
        await run.until_finished()

        check_ledger(build_ledger(run.run_dir))
        assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4, 5, 6]
        announced = await run.announced()
        assert list(dict.fromkeys(announced)) == [line["seq"] for line in run.lines]
        assert len(run.bodies("run_finished")) == 1
        assert len(build_ledger(run.run_dir).trained) == 6 * 4
        assert set(run.agents.played.values()) == {1}


async def test_a_standby_goes_on_with_the_run_of_a_scheduler_that_died(make_run: MakeRun) -> None:
    async with make_run(max_steps=6) as run:
        await run.learner.begin()
        run.go(run.learner.train())
        run.standby.start()
        await run.until(lambda: "standing by" in run.standby.log and run.learner.step >= 2)
        run.scheduler.kill()
        await run.until(lambda: "state taken over" in run.standby.log)
        run.scheduler.start()  # the next standby
        await run.until(lambda: "standing by" in run.scheduler.log and run.learner.step >= 4)
        run.standby.kill()
        await run.until_finished()

        check_ledger(build_ledger(run.run_dir))
        assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4, 5, 6]
        assert list(dict.fromkeys(await run.announced())) == [line["seq"] for line in run.lines]
        assert [body["step"] for body in run.bodies("run_finished")] == [6]
        assert set(run.agents.played.values()) == {1}


@pytest.mark.parametrize("lost", ["record", "trajectory"])
async def test_a_group_whose_writes_redis_has_lost_holds_up_no_run(
    lost: str, make_run: MakeRun
) -> None:
    """As after a power failure of its host, with `fsync: everysec`."""
    async with make_run(max_steps=2, eval_steps=0) as run:
        name, key = "t00000001", f"{{{run.run}}}:"

        def hangs(task: EpisodeTask) -> Outcome | None:
            return None if task.episode_id == f"{name}.0" else Outcome.OK

        run.agents.outcome_of = hangs
        await run.learner.begin()
        run.go(run.learner.train())
        ended = [f"{name}.1", f"{name}.2"]
        await run.until(
            lambda: {*ended} <= {one["episode_id"] for one in run.bodies("episode_settled")}
        )
        await run.until(lambda: bool(run.agents.held))
        if lost == "record":
            await run.store.command("DEL", f"{key}group:{name}", f"{key}data:{name}")
            for names in ("open", "ages"):
                await run.store.command("ZREM", f"{key}{names}", name)
        else:
            await run.store.command("HDEL", f"{key}group:{name}", "s1")
            await run.store.command("HSET", f"{key}group:{name}", "left", 2, "valid", 1)
            await run.agents.put(run.agents.held.pop())
        await run.until_finished()
        [closed] = [body for body in run.bodies("group_closed") if body["group_id"] == name]
        assert closed["sent_to_learner"] == (lost == "trajectory")


@pytest.mark.parametrize("first_lost", ["evaluation_started", "group_closed", "evaluation_finished"])
async def test_a_log_that_has_lost_its_last_lines_holds_up_no_run(
    first_lost: str, make_run: MakeRun
) -> None:
    """As after a power failure: Redis writes to its disk every second, the log when the system does."""
    async with make_run(max_steps=1, eval_steps=0) as run:
        held = "e0-v0.00002.0" if first_lost == "group_closed" else ""

        def hangs(task: EpisodeTask) -> Outcome | None:
            return None if task.episode_id == held or task.phase == "train" else Outcome.OK

        run.agents.outcome_of = hangs
        await run.learner.begin()
        num_closed = 5 if held else 6
        await run.until(lambda: len(run.bodies("group_closed")) == num_closed)
        await run.until(lambda: bool(held or run.bodies("evaluation_finished")))
        await cut_log(run, first_lost)
        run.agents.outcome_of = lambda task: Outcome.OK
        for task in run.agents.held:
            await run.agents.put(task)
        run.go(run.learner.train())
        await run.until_finished()
        assert [body["step"] for body in run.bodies("evaluation_finished")] == [0, 1]


async def test_a_log_that_has_lost_its_end_gets_it_again(make_run: MakeRun) -> None:
    async with make_run(max_steps=1, eval_steps=0) as run:
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()
        await cut_log(run, "run_finished")
        await run.until(lambda: bool(run.bodies("run_finished")))
        assert len(run.bodies("run_finished")) == 1


async def cut_log(run: FakeRun, first_lost: str) -> None:
    """Let the log lose its lines from the first event of a kind on, while the scheduler is away."""
    while await run.store.command("XLEN", f"{{{run.run}}}:outbox"):
        await asyncio.sleep(0.01)  # an event that the log has is deleted there
    run.scheduler.kill()
    log = run.run_dir / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if first_lost.encode() in line)
    log.write_bytes(b"".join(lines[:first]))
    run.scheduler.start()


async def test_a_straggler_is_cancelled_at_its_groups_deadline_and_the_group_is_trained(
    make_run: MakeRun,
) -> None:
    async with make_run(max_steps=1, eval_steps=0, scheduler={"group_timeout_s": 8.0}) as run:

        def hangs(task: EpisodeTask) -> Outcome | None:
            return None if task.phase == "train" and task.member == 1 else Outcome.OK

        run.agents.outcome_of = hangs
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()

        settled = [body for body in run.bodies("episode_settled") if body["phase"] == "train"]
        assert Counter(body["outcome"] for body in settled) == {"ok": 8, "cancelled": 4}
        assert {body["member"] for body in settled if body["outcome"] == "cancelled"} == {1}
        assert run.rows[-1]["outcome/cancelled"] == 4
        check_ledger(build_ledger(run.run_dir))


async def test_a_group_at_the_staleness_horizon_closes_without_its_straggler_which_is_stopped(
    make_run: MakeRun,
) -> None:
    stopped: list[str] = []

    async def on_stopped(message: EpisodesStopped) -> None:
        stopped.extend(message.episode_ids)

    async with make_run(max_steps=3, eval_steps=0, stale_groups="close") as run:
        await run.bus.subscribe(subjects.episodes_stopped(run.run), EpisodesStopped, on_stopped)

        def hangs(task: EpisodeTask) -> Outcome | None:
            return None if task.episode_id == "t00000000.1" else Outcome.OK

        run.agents.outcome_of = hangs
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until_finished()

        [cancelled] = [body for body in run.bodies("episode_settled") if body["outcome"] == "cancelled"]
        assert cancelled["episode_id"] == "t00000000.1"
        assert "closed at the staleness horizon: 2 of 3 members valid" in cancelled["reason"]
        assert stopped == ["t00000000.1"]
        steps = {body["step"]: body["group_ids"] for body in run.bodies("step_finished")}
        assert "t00000000" in steps[2], "no later step may train it"
        check_ledger(build_ledger(run.run_dir))


async def test_nats_and_redis_killed_and_started_again_only_delay_a_run(
    make_run: MakeRun, nats_server: ServerProcess, redis_server: ServerProcess
) -> None:
    async with make_run(max_steps=5, scheduler={"server_timeout_s": 1.0}) as run:
        await run.learner.begin()
        run.go(run.learner.train())
        for step, server in ((1, nats_server), (2, redis_server)):
            await run.until(lambda step=step: run.learner.step >= step)
            server.kill()
            server.start()
        await run.until_finished()

        check_ledger(build_ledger(run.run_dir))
        assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4, 5]


async def test_episodes_lost_with_the_work_queue_go_out_as_a_new_attempt(make_run: MakeRun) -> None:
    async with make_run(max_steps=1, eval_steps=0, scheduler={"lease_ttl_s": 4.0}) as run:
        first: set[str] = set()

        def vanish(task: EpisodeTask) -> Outcome | None:
            if task.phase == "train" and task.attempt == 0:
                first.add(task.episode_id)
                return None
            return Outcome.OK

        run.agents.outcome_of = vanish
        await run.learner.begin()
        run.go(run.learner.train())
        await run.until(lambda: len(first) == 12)
        run.agents.worker_id = "agents-1"  # the one that held them is never heard of again
        jetstream = run.bus.jetstream
        await jetstream.purge_stream(f"{run.run}_EPISODES")
        await run.until_finished()

        assert {body["attempt"] for body in run.bodies("episode_redelivered")} == {1}
        check_ledger(build_ledger(run.run_dir))


async def test_a_learner_that_resumes_takes_back_the_rows_after_its_checkpoint(
    make_run: MakeRun,
) -> None:
    async with make_run(max_steps=4) as run:
        run.learner.save_steps = 2
        await run.learner.begin()
        training = run.go(run.learner.train())
        run.learner.max_steps = 3
        await run.until(lambda: training.done() and bool(run.rows) and run.rows[-1]["step"] == 3)
        run.learner.max_steps = 4
        await run.learner.begin(step=2, checkpoint="step_2")
        run.go(run.learner.train())
        await run.until_finished()

        assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4]
        check_ledger(build_ledger(run.run_dir))


async def test_the_time_in_which_a_run_is_stopped_is_nobodys_idle_time(make_run: MakeRun) -> None:
    down_s = 2.0
    async with make_run(max_steps=2, eval_steps=0) as run:
        await run.learner.begin()
        run.learner.max_steps = 1
        training = run.go(run.learner.train())
        await run.until(lambda: training.done() and bool(run.rows) and run.rows[-1]["step"] == 1)
        run.scheduler.kill()
        await asyncio.sleep(down_s)  # no synchronisation: this is the time that must not count
        run.scheduler.start()
        run.learner.max_steps = 2
        run.go(run.learner.train())
        await run.until_finished()

        before, row = run.rows[-2:]
        accounts = [row[key] for key in row if key.startswith(("idle/", "busy/"))]
        assert 0 <= sum(accounts) <= row["time_s"] - before["time_s"] - down_s


async def test_a_wrong_capacity_ends_the_process_with_code_two_and_one_line(make_run: MakeRun) -> None:
    run = make_run(scheduler={"max_buffered_groups": 3})
    run.scheduler.start()
    assert run.scheduler.ended(60) == 2
    said = run.scheduler.log
    assert "Traceback" not in said
    assert "scheduler.max_buffered_groups" in said
    assert "at least 4" in said


async def test_a_run_in_which_every_episode_fails_ends_and_says_why(make_run: MakeRun) -> None:
    async with make_run(scheduler={"max_failed_groups": 4}) as run:
        run.agents.outcome_of = lambda task: Outcome.INFRA_FAILURE
        await run.learner.begin()
        await run.until(lambda: run.statuses[-1].phase == "failed")

        (failed,) = run.bodies("run_failed")
        assert failed["rule"] == "failed_groups"
        assert "scheduler.max_failed_groups" in failed["reason"]
        status = run.statuses[-1]
        assert status.failed is not None
        assert status.num_failures >= 4
        assert "run failed" in run.scheduler.log
