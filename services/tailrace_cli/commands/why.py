"""`tailrace why`: the critical path of a run or of one episode, from its `events.jsonl`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tailrace.config import ConfigError
from tailrace_cli.commands.options import OutputDir
from tailrace_cli.console import stdout
from tailrace_cli.event_log import log_of, read_events
from tailrace_cli.why.causes import REMEDIES, Cause
from tailrace_cli.why.path import PathPart, path_of_episode, path_of_run
from tailrace_cli.why.timeline import Timeline, timeline_of

_NUM_CAUSES = 3


def why(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's name or directory, or its events.jsonl.")
    ],
    episode: Annotated[str, typer.Option(help="Id of one episode instead of the whole run.")] = "",
    output_dir: OutputDir = "runs",
) -> None:
    """Print where a run's or an episode's time went, and the settings that move the largest parts."""
    show_times(run, episode, output_dir, stdout)


def show_times(run: str, episode_id: str, output_dir: str, console: Console) -> None:
    """Prints seconds and share by cause, and the largest causes with the settings that move them.

    `run` is a name, a directory or an `events.jsonl`.
    """
    timeline = timeline_of(read_events(log_of(run, output_dir)), lambda each: each == episode_id)
    if not episode_id:
        stopped = f", without {timeline.stopped_s:.1f} s in which it was stopped"
        title = f"{run}: {timeline.ended - timeline.began:.1f} s"
        _show(path_of_run(timeline), title + (stopped if timeline.stopped_s else ""), console)
        return
    try:
        path = path_of_episode(timeline, episode_id)
    except KeyError:
        raise ConfigError(
            f"--episode {episode_id}: {run} has no settled episode of this name"
            f"{_example(timeline)}; ids are in its events.jsonl"
        ) from None
    episode = timeline.episodes[episode_id]
    _show(path, f"{episode_id}: {episode.outcome}, {episode.num_turns} turns", console)


def _example(timeline: Timeline) -> str:
    first = timeline.first_episode
    return f" (one of its {timeline.num_episodes} is {first})" if first else ""


def _show(path: Sequence[PathPart], title: str, console: Console) -> None:
    by_cause = Counter[Cause]()
    for part in path:
        by_cause[part.cause] += part.seconds  # type: ignore[assignment]  # counts in seconds
    whole = sum(by_cause.values())
    if not whole:
        raise ConfigError(f"{title}: nothing has happened yet")
    table = Table(title=title, title_justify="left")
    table.add_column("cause")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("meaning")
    for cause, seconds in by_cause.most_common():
        share = f"{100 * seconds / whole:.0f}%"
        table.add_row(cause.value, f"{seconds:.1f}", share, REMEDIES[cause].meaning)
    console.print(table)
    for place, (cause, _) in enumerate(by_cause.most_common(_NUM_CAUSES), 1):
        for line in _advice(place, cause, path):
            console.print(line, soft_wrap=True)


def _advice(place: int, cause: Cause, path: Sequence[PathPart]) -> Iterator[str]:
    longest = max((part for part in path if part.cause is cause), key=lambda part: part.seconds)
    at = f" (longest: {longest.seconds:.1f} s, {longest.place})" if longest.place else ""
    remedy = REMEDIES[cause]
    yield f"{place}. {cause.value}{at}: {remedy.advice}"
    yield f"   settings: {', '.join(remedy.keys)}"
