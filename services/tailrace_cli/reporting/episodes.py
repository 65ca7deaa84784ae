"""Episodes that a report shows: the best, median and worst of the first and the last evaluation."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace_agents.adapters.kept_episodes import FOLDER, KeptEpisode
from tailrace_cli.damaged import DamagedRunError
from tailrace_scheduler.core.evaluation import evaluation_of

_MAX_CHARS = 6_000  # of a message


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


def chosen_episodes(run_dir: Path, evaluations: Mapping[int, str]) -> list[ShownEvaluation]:
    """Episodes of the first and the last of `evaluations` (id by step) that have some."""
    kept: defaultdict[str, list[KeptEpisode]] = defaultdict(list)
    for episode in _kept(run_dir / FOLDER):
        kept[evaluation_of(episode.group_id)].append(episode)
    steps = sorted(step for step, name in evaluations.items() if name in kept)
    ends = sorted({steps[0], steps[-1]}) if steps else []
    return [ShownEvaluation(step, tuple(_chosen(kept[evaluations[step]]))) for step in ends]


def _kept(folder: Path) -> Iterator[KeptEpisode]:
    decoder = msgspec.json.Decoder(KeptEpisode)
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # else torn: it is being written, or its writer was killed
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise DamagedRunError(file, error) from error


def _chosen(episodes: Sequence[KeptEpisode]) -> Iterator[ShownEpisode]:
    """The sampled ones alone, if there are some: greedy ones are no fair sample of the policy."""
    sampled = [episode for episode in episodes if not episode.is_greedy] or list(episodes)
    valid = [episode for episode in sampled if episode.outcome.is_valid] or sampled
    valid.sort(key=lambda episode: (-episode.reward, -(episode.success or 0.0), episode.episode_id))
    places = {"best": 0, "median": len(valid) // 2, "worst": len(valid) - 1}
    for name, place in places.items():
        yield ShownEpisode(f"{name} of {len(valid)}", valid[place], tuple(_turns(valid[place])))


def _turns(episode: KeptEpisode) -> Iterator[ShownTurn]:
    num_replies = sum(message.role == "assistant" for message in episode.messages)
    rewards = iter(episode.turn_rewards if len(episode.turn_rewards) == num_replies else ())
    for message in episode.messages:
        yield ShownTurn(
            f"{message.role} {message.name}".strip(),
            _cut(message.content),
            _cut(message.reasoning),
            tuple(f"{call.name}({_cut(call.arguments)})" for call in message.tool_calls),
            next(rewards, None) if message.role == "assistant" else None,
        )


def _cut(text: str) -> str:
    left_out = len(text) - _MAX_CHARS
    return text if left_out <= 0 else f"{text[:_MAX_CHARS]}\n[{left_out:,} more characters]"
