"""`report.html`: one self-contained page with the summary, the curves and rendered episodes."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from tailrace_cli.report.curves import PANELS, draw
from tailrace_cli.report.metrics_file import read_metrics
from tailrace_cli.report.summary import summary_rows

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


def write_report(run_dir: Path, title: str, renders_dir: Path) -> Path:
    """Write `<run_dir>/report.html` from the run's metrics and renders; returns its path."""
    rows = read_metrics(run_dir)
    summary = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in summary_rows(rows)
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
