"""Episodes that a report shows: the best, median and worst of the first and the last evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace_agents.adapters.kept_episodes import FOLDER, KeptEpisode
from tailrace_cli.damaged import decoded_line
from tailrace_protos.chat import ToolCall
from tailrace_scheduler.core.evaluation import evaluation_of

T = TypeVar("T")
_MAX_CHARS = 6_000  # of a message
_MAX_TURNS = 100  # messages of an episode
_MAX_CALLS = 8  # of a message


@dataclass(frozen=True)
class ShownTurn:
    """One message as it is shown."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # of tools, as name and arguments
    reward: float | None = None


@dataclass(frozen=True)
class ShownEpisode:
    """One episode with its place in its evaluation."""

    place: str  # such as "best of 32"
    episode: KeptEpisode
    turns: tuple[ShownTurn, ...]


@dataclass(frozen=True)
class ShownEvaluation:
    """Chosen episodes of the evaluation of `step`."""

    step: int
    episodes: tuple[ShownEpisode, ...]


class _Place(msgspec.Struct):
    """Group of a kept episode, which tells its evaluation."""

    group_id: str


def chosen_episodes(run_dir: Path, evaluations: Mapping[int, str]) -> list[ShownEvaluation]:
    """Episodes of the first and the last of `evaluations` (id by step) that have some.

    Only those are kept in memory: a long run has many.
    """
    folder = run_dir / FOLDER
    known = {evaluation_of(place.group_id) for place in _lines_of(folder, _Place)}
    steps = sorted(step for step, name in evaluations.items() if name in known)
    ends = sorted({steps[0], steps[-1]}) if steps else []
    kept: dict[str, list[KeptEpisode]] = {evaluations[step]: [] for step in ends}
    for episode in _lines_of(folder, KeptEpisode) if ends else ():
        if (evaluation := evaluation_of(episode.group_id)) in kept:
            kept[evaluation].append(episode)
    return [ShownEvaluation(step, tuple(_chosen(kept[evaluations[step]]))) for step in ends]


def _lines_of(folder: Path, kind: type[T]) -> Iterator[T]:
    """Whole lines of all files; a torn one is being written, or its writer was killed."""
    decoder = msgspec.json.Decoder(kind)
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield decoded_line(decoder, line, path)


def _chosen(episodes: Sequence[KeptEpisode]) -> Iterator[ShownEpisode]:
    """The sampled ones alone, if there are some: greedy ones are no fair sample of the policy."""
    sampled = [episode for episode in episodes if not episode.is_greedy] or list(episodes)
    valid = [episode for episode in sampled if episode.outcome.is_valid] or sampled
    valid.sort(key=lambda episode: (-episode.reward, -(episode.success or 0.0), episode.episode_id))
    places = {"best": 0, "median": len(valid) // 2, "worst": len(valid) - 1}
    for name, place in places.items():
        turns = _ends(tuple(_turns(valid[place])))
        yield ShownEpisode(f"{name} of {len(valid)}", valid[place], turns)


def _ends(turns: tuple[ShownTurn, ...]) -> tuple[ShownTurn, ...]:
    """The first and the last messages of a long episode."""
    left_out = len(turns) - _MAX_TURNS
    if left_out <= 0:
        return turns
    half = _MAX_TURNS // 2
    between = ShownTurn("left out", f"[{left_out:,} more messages]")
    return (*turns[:half], between, *turns[-half:])


def _turns(episode: KeptEpisode) -> Iterator[ShownTurn]:
    num_replies = sum(message.role == "assistant" for message in episode.messages)
    rewards = iter(episode.turn_rewards if len(episode.turn_rewards) == num_replies else ())
    for message in episode.messages:
        yield ShownTurn(
            f"{message.role} {message.name}".strip(),
            _cut(message.content),
            _cut(message.reasoning),
            tuple(_calls(message.tool_calls)),
            next(rewards, None) if message.role == "assistant" else None,
        )


def _calls(calls: Sequence[ToolCall]) -> Iterator[str]:
    for call in calls[:_MAX_CALLS]:
        yield f"{_cut(call.name)}({_cut(call.arguments)})"
    if len(calls) > _MAX_CALLS:
        yield f"[{len(calls) - _MAX_CALLS:,} more calls]"


def _cut(text: str) -> str:
    left_out = len(text) - _MAX_CHARS
    return text if left_out <= 0 else f"{text[:_MAX_CHARS]}\n[{left_out:,} more characters]"
