"""`python -m tests.fuzz`: a campaign of seeded inputs, or one input again."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.results import Results
from tests.fuzz.campaign import Tally, counts_of, play, rss_mib
from tests.fuzz.decoders import RefusedError, Target, decoder_targets, handler_targets
from tests.fuzz.sockets import play_sockets

MAX_GROWTH_MIB = 64
_WARM = 200  # inputs of each target before memory is measured


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--inputs",
        type=int,
        default=1_000_000,
        help="inputs of this process's targets and sockets together",
    )
    parser.add_argument("--sockets", type=int, default=20_000, help="how many of them go over sockets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="", help="only targets whose name contains this")
    parser.add_argument("--replay", type=Path, help="give the target this file alone")
    parser.add_argument(
        "--failures", type=Path, default=Path("runs/fuzz"), help="folder of failing inputs"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fuzz.json")
    return parser.parse_args()


def main() -> int:
    """Run the campaign; exit code 1 if an input failed or memory grew."""
    given = options()
    known = [*handler_targets(), *decoder_targets()]
    targets = [target for target in known if given.target in target.name]
    if given.replay:
        return _replay(targets[0], given.replay)
    num_sockets = given.sockets if not given.target else 0
    counts = counts_of(targets, given.inputs - num_sockets)
    for target in targets:
        play(target, given.seed - 1, range(_WARM), given.failures)
    before = rss_mib()
    tallies = [play(one, given.seed, range(counts[one.name]), given.failures) for one in targets]
    grown = rss_mib() - before
    if num_sockets:
        tallies += asyncio.run(play_sockets(given.seed, num_sockets, given.failures))
    return _report(given, tallies, grown)


def _replay(target: Target, path: Path) -> int:
    try:
        target.run(path.read_bytes())
    except RefusedError as error:
        sys.stdout.write(f"refused: {error}\n")
    else:
        sys.stdout.write("taken\n")
    return 0


def _report(given: argparse.Namespace, tallies: list[Tally], grown: float) -> int:
    results = Results("fuzz", ("tailrace", "msgspec", "nats-py", "pyzmq"), seed=given.seed)
    for tally in [*_summed(tallies)]:
        results.add(**{name: cell for name, cell in asdict(tally).items() if name != "failures"})
        for failure in tally.failures:
            sys.stdout.write(f"{tally.target}: {failure}\n")
    total = sum(tally.num_inputs for tally in tallies)
    results.at_least("inputs", total, given.inputs)
    results.at_most("crashes", sum(tally.num_crashes for tally in tallies), 0)
    results.at_most("dead loops (over 10 s)", sum(tally.num_dead_loops for tally in tallies), 0)
    results.at_most("growth of this process over its targets, MiB", grown, MAX_GROWTH_MIB)
    sockets = [tally.grown_mib for tally in tallies if tally.target.startswith("socket/")]
    if sockets:
        results.at_most(
            "growth of the process that serves the sockets, MiB", sum(sockets), MAX_GROWTH_MIB
        )
    results.show()
    if given.write:
        sys.stdout.write(f"{results.write()}\n")
    return results.exit_code


def _summed(tallies: list[Tally]) -> list[Tally]:
    """Sums the decoders of all messages into one row for each encoding."""
    summed: dict[str, Tally] = {}
    for tally in tallies:
        kind, _, _ = tally.target.partition("/")
        name = kind if kind.startswith("decode") else tally.target
        into = summed.setdefault(name, Tally(name))
        for key, value in asdict(tally).items():
            if key != "target":
                setattr(into, key, getattr(into, key) + value)
    return list(summed.values())


if __name__ == "__main__":
    sys.exit(main())
