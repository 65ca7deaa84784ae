"""Pages of runs: data for the templates in `assets/`, with style, script and uPlot inside the page."""

import base64
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tailrace_cli.launch import read_launches
from tailrace_cli.reporting.curves import COMPARED, PANELS, curves
from tailrace_cli.reporting.digest import RunDigest
from tailrace_cli.reporting.episodes import chosen_episodes
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.summary import (
    Row,
    idle_seconds,
    last,
    read_metrics,
    sampling_name,
    series,
    summary_rows,
)

RELOAD_S = 30  # of the page of a run that goes on
_MAX_RENDERS = 12
_MAX_BINS = 24
_MIME = {".png": "image/png", ".gif": "image/gif"}


@dataclass(frozen=True)
class Tile:
    """One figure of a run, with a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """A labelled share (0 to 1) of the longest bar."""

    name: str
    text: str
    share: float


@dataclass(frozen=True)
class Histogram:
    """Numbers of episodes by value; each bar is a range of values."""

    title: str
    bars: tuple[Bar, ...]
    first: int
    last: int
    mean: str


class RunReport:
    """Report of one run. Writing it again reads only what is new in the run's events."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._digest = RunDigest(run.path / "events.jsonl")

    def write(self, path: Path | None = None) -> Path:
        """Write the page, to `<run_dir>/report.html` if nothing is named; returns its path."""
        run, digest = self._run, self._digest
        digest.read_on()
        rows, (state, detail) = read_metrics(run.path), run.state()
        launches = read_launches(run.path)
        return _write(
            path or run.path / "report.html",
            "run.html",
            title=run.path.name,
            state=state,
            detail=detail,
            reload_s=RELOAD_S if state == "running" else 0,
            tiles=_tiles(run, rows, digest),
            summary=summary_rows(rows, digest.health.health, run.baselines, run.eval_temperature),
            data=_json({"panels": curves({run.path.name: rows}, PANELS)}),
            idle=_idle_bars(rows),
            outcomes={phase: _bars(counts) for phase, counts in digest.outcomes.items() if counts},
            histograms=_histograms(digest),
            evaluations=chosen_episodes(run.path, digest.evaluations),
            renders=_renders(run.renders_dir),
            launches=launches,
            config=(run.path / "config.yaml").read_text(encoding="utf-8"),
        )


def _distinct(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Runs by name, by path where several have the same name."""
    times = Counter(run.path.name for run in runs)
    return {run.path.name if times[run.path.name] == 1 else str(run.path): run for run in runs}


def write_comparison(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write a page that compares runs, in their order; returns its path.

    Runs of one name are named by their folders; a run that is given twice is shown once.
    """
    runs = list({run.path.resolve(): run for run in runs}.values())
    names = _distinct(runs)
    metrics = {name: read_metrics(run.path) for name, run in names.items()}
    digests = [RunDigest(run.path / "events.jsonl") for run in runs]
    for digest in digests:
        digest.read_on()
    tiles = [_tiles(*each) for each in zip(runs, metrics.values(), digests, strict=True)]
    figures: dict[str, list[str]] = {"state": [run.state()[0] for run in runs]}
    for place, of_run in enumerate(tiles):
        for tile in of_run:
            empty = ["-"] * len(runs)
            figures.setdefault(tile.name, empty)[place] = f"{tile.value} {tile.note}".strip()
    return _write(
        path,
        "comparison.html",
        title="Comparison of runs",
        names=list(metrics),
        figures=figures,
        differences=differences({name: run.settings for name, run in names.items()}),
        data=_json({"panels": curves(metrics, COMPARED)}),
    )


def differences(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Values of dotted keys in which the runs differ, in the order of the runs; `exp_name` aside."""
    flat = [dict(_flat(of_run)) for of_run in settings.values()]
    keys = sorted({key for of_run in flat for key in of_run} - {"exp_name"})
    rows = {key: [json.dumps(of_run.get(key), default=str) for of_run in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tiles(run: RunFolder, rows: Sequence[Row], digest: RunDigest) -> list[Tile]:
    how = sampling_name(run.eval_temperature)
    tiles = [
        *_success(rows, "eval/success_rate", f"Held-out success, {how}"),
        *_success(rows, "eval/greedy/success_rate", "Held-out success, greedy"),
        *_best_player(run),
    ]
    num_steps = int(last(rows, "step") or 0)
    tiles.append(Tile("Optimizer steps", f"{num_steps:,}", f"of {run.settings.get('max_steps', '?')}"))
    if (wall_s := last(rows, "time_s")) is not None:
        tiles.append(Tile("Time", _duration(wall_s)))
    num_tokens, staleness = sum(series(rows, "num_trained_tokens")[1]), series(rows, "staleness_max")[1]
    if num_tokens:
        tiles.append(Tile("Trained tokens", _short(num_tokens)))
    if staleness:
        tiles.append(Tile("Staleness, at most", f"{max(staleness):.0f}", "steps"))
    outcomes = sum(digest.outcomes.values(), Counter[str]())
    tiles.append(Tile("Episodes", f"{outcomes.total():,}"))
    num_failed = outcomes["infra_failure"] + outcomes["timeout"]
    tiles.append(Tile("Failed episodes", f"{num_failed:,}", "infrastructure, timeouts"))
    return tiles


def _success(rows: Sequence[Row], key: str, name: str) -> Iterator[Tile]:
    _, values = series(rows, key)
    if values:
        yield Tile(name, f"{values[-1]:.3f}", f"from {values[0]:.3f}" if len(values) > 1 else "")


def _best_player(run: RunFolder) -> Iterator[Tile]:
    if players := run.players:
        rate, name = max(players)
        yield Tile("Best simple player", f"{rate:.3f}", name)


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f} {unit}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
    )


def _idle_bars(rows: Sequence[Row]) -> list[Bar]:
    seconds = {f"waiting for {key.removeprefix('idle/')}": s for key, s in idle_seconds(rows).items()}
    for key in ("busy/learner", "busy/engine"):
        seconds[f"work of the {key.removeprefix('busy/')}"] = sum(series(rows, key)[1])
    whole = sum(seconds.values())
    top = max(seconds.values(), default=0.0)
    ordered = sorted(seconds.items(), key=lambda each: -each[1])
    return [
        Bar(name, f"{value:,.1f} s, {100 * value / whole:.0f}%", value / top)
        for name, value in ordered
        if value
    ]


def _bars(counts: Counter[str]) -> list[Bar]:
    top, whole = max(counts.values()), counts.total()
    return [
        Bar(name.replace("_", " "), f"{count:,}, {100 * count / whole:.1f}%", count / top)
        for name, count in counts.most_common()
    ]


def _histograms(digest: RunDigest) -> list[Histogram]:
    kinds = {
        "Length: sampled tokens": digest.lengths,
        "Model turns": digest.turns,
        "Staleness: steps since the oldest token's weights": digest.staleness,
    }
    return [_histogram(title, counts) for title, counts in kinds.items() if counts]


def _histogram(title: str, counts: Counter[int]) -> Histogram:
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // _MAX_BINS)
    bins = Counter[int]()
    for value, count in counts.items():
        bins[(value - low) // width] += count
    top = max(bins.values())
    ranges = [
        (low + place * width, min(low + (place + 1) * width - 1, high))
        for place in range(max(bins) + 1)
    ]
    bars = tuple(
        Bar(
            str(start) if start == end else f"{start} to {end}",
            f"{bins[place]:,} episodes",
            bins[place] / top,
        )
        for place, (start, end) in enumerate(ranges)
    )
    mean = sum(value * count for value, count in counts.items()) / counts.total()
    return Histogram(title, bars, low, high, f"{mean:,.1f}")


def _renders(folder: Path) -> list[dict[str, str]]:
    files = (sorted(folder.glob("*.gif")) or sorted(folder.glob("*.png")))[:_MAX_RENDERS]
    return [{"name": file.stem, "source": _data_url(file)} for file in files]


def _data_url(file: Path) -> str:
    return f"data:{_MIME[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _json(content: object) -> Markup:
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))  # ends no script


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("tailrace_cli.reporting", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals["asset"] = lambda name: Markup(templates.loader.get_source(templates, name)[0])  # type: ignore[union-attr]
    templates.filters["date"] = lambda unix_s: time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime(unix_s)
    )
    return templates


def _write(path: Path, template: str, **content: object) -> Path:
    """The file appears complete: a browser may reload it at any time."""
    page = _templates().get_template(template).render(written_unix_s=time.time(), **content)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch(0o600)  # it shows episodes and settings
        part.write_text(page, encoding="utf-8", errors="replace")  # names of folders have any bytes
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path
