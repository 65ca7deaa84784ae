"""`report.html`: one self-contained page with the summary, the curves and rendered episodes."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from tailrace_cli.summary import (
    NO_BASELINES,
    Baselines,
    Row,
    read_health,
    read_metrics,
    series,
    summary_rows,
)


@dataclass(frozen=True)
class Panel:
    """One picture: its title and the metric keys drawn in it."""

    title: str
    keys: tuple[str, ...]


_CRITIC = ("value_loss", "explained_variance")
PANELS = (
    Panel(
        "Success rate: held-out evaluation, sampled and greedy; training",
        ("eval/success_rate", "eval/greedy/success_rate", "success_rate"),
    ),
    Panel("Reward per episode", ("reward_mean", "reward_std")),
    Panel("Loss", ("loss",)),
    Panel("Entropy of the policy, nats per token", ("entropy",)),
    Panel("Staleness of trained tokens, optimizer steps", ("staleness_mean", "staleness_max")),
    Panel("Learner against inference log-probabilities", ("mismatch_kl", "behaviour_kl")),
    Panel("Trained tokens per second", ("tokens_per_s",)),
    Panel("Gradient norm", ("grad_norm", "critic_grad_norm")),
    Panel("Divergence from the reference, and its weight", ("kl", "kl_coef")),
    Panel("The critic: its loss, and the variance of returns that it explains", _CRITIC),
)


def draw(panel: Panel, rows: Sequence[Row]) -> bytes | None:
    """PNG bytes of a panel, or None when the run has no value for any of its keys."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for key in panel.keys:
        steps, values = series(rows, key)
        if steps:
            marker = "o" if key.startswith("eval/") else None
            axes.plot(steps, values, label=key, linewidth=1.3, marker=marker, markersize=3)
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step")
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


MAX_RENDERS = 12
_MIME = {".png": "image/png", ".gif": "image/gif"}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; color: #222; }}
td {{ padding: .15rem 1rem .15rem 0; }} td:last-child {{ font-variant-numeric: tabular-nums; }}
.grid {{ display: flex; flex-wrap: wrap; gap: 1rem; }} figure {{ margin: 0; }}
figcaption {{ font-size: 12px; color: #666; }} img {{ max-width: 520px; }}
.renders img {{ width: 160px; }}</style></head><body><h1>{title}</h1><table>{summary}</table>
<h2>Curves</h2><div class="grid">{curves}</div>{renders}</body></html>
"""


def write_report(
    run_dir: Path,
    title: str,
    renders_dir: Path,
    baselines: Baselines = NO_BASELINES,
    temperature: float = 1.0,
) -> Path:
    """Write `<run_dir>/report.html` from the run's metrics and renders; returns its path."""
    rows = read_metrics(run_dir)
    summary = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in summary_rows(rows, read_health(run_dir), baselines, temperature)
    )
    pictures = ((panel, draw(panel, rows)) for panel in PANELS)
    curves = "".join(
        _figure(picture, "image/png", panel.title) for panel, picture in pictures if picture is not None
    )
    path = run_dir / "report.html"
    renders = _renders(renders_dir)
    page = _PAGE.format(title=html.escape(title), summary=summary, curves=curves, renders=renders)
    path.write_text(page, encoding="utf-8")
    return path


def _renders(folder: Path) -> str:
    files = (sorted(folder.glob("*.gif")) or sorted(folder.glob("*.png")))[:MAX_RENDERS]
    if not files:
        return ""
    figures = "".join(_figure(file.read_bytes(), _MIME[file.suffix], file.stem) for file in files)
    return f'<h2>Episodes of the last evaluation</h2><div class="grid renders">{figures}</div>'


def _figure(picture: bytes, mime: str, caption: str) -> str:
    data = base64.b64encode(picture).decode()
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:{mime};base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"
