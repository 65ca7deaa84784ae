"""A short campaign over every target, as `make fuzz` runs for minutes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz.campaign import Tally, counts_of, play
from tests.fuzz.decoders import RefusedError, decoder_targets, handler_targets
from tests.fuzz.sockets import play_sockets

TARGETS = [*handler_targets(), *decoder_targets()]


def clean(tallies: list[Tally]) -> list[str]:
    """Failures of all targets; an empty list is what a campaign must show."""
    return [failure for tally in tallies for failure in tally.failures]


def test_no_input_breaks_a_decoder_or_the_code_behind_it(tmp_path: Path) -> None:
    counts = counts_of(TARGETS, 20_000)
    tallies = [play(target, 7, range(counts[target.name]), tmp_path) for target in TARGETS]
    assert clean(tallies) == []
    for tally in tallies:
        assert tally.num_taken + tally.num_refused == tally.num_inputs
        if not tally.target.startswith("decode"):
            assert tally.num_taken > 0, f"{tally.target}: no input reached the code behind the decoder"
            assert tally.num_refused > 0


def test_an_input_follows_from_target_seed_and_index() -> None:
    target = TARGETS[0]
    assert target.input_of(1, 9) == target.input_of(1, 9)
    assert target.input_of(1, 9) != target.input_of(2, 9)


def test_an_input_that_breaks_its_target_is_kept_with_the_command_that_repeats_it(
    tmp_path: Path,
) -> None:
    def breaks(data: bytes) -> None:
        if len(data) % 2:
            raise KeyError("lost")
        raise RefusedError("even")

    tally = play(TARGETS[0]._replace(name="made/broken", run=breaks), 1, range(40), tmp_path)
    assert 0 < tally.num_crashes < 40
    assert tally.num_crashes + tally.num_refused == 40
    kept = sorted(tmp_path.glob("made-broken-1-*.bin"))
    assert len(kept) == len(tally.failures) == min(tally.num_crashes, 20)
    assert all(len(path.read_bytes()) % 2 for path in kept)
    assert f"python -m tests.fuzz --target made/broken --replay {tmp_path}" in tally.failures[0]


async def test_no_input_breaks_a_service_behind_its_socket(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert clean(await play_sockets(7, 1_000, tmp_path)) == []
    assert dict(os.environ) == before, "later tests of this process would see the variables of this one"
