"""Results in `docs/scheduling.md`: everything below the line `## Results` is written here."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.results import Results

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
HEADING = "## Results\n"
COLUMNS = ("efficiency", "attainment", "masked", "thrown", "length_bias", "reprefill", "learner_idle")


def write_page(results: Results) -> None:
    """Replace the results of the page by these rows and targets."""
    text = PAGE.read_text(encoding="utf-8")
    written = text[: text.index(HEADING) + len(HEADING)]
    lines = ["", "### Goals", "", "| what | value | goal | |", "|---|---|---|---|"]
    lines += [
        f"| {one.what} | {one.value:.4g} | {one.goal} | {'holds' if one.holds else 'missed'} |"
        for one in results.targets
    ]
    lines += ["", "### Every cell", "", *_cells(results.rows), ""]
    lines += ["### Every policy", "", "Means over seeds, numbered from 11.", ""]
    lines += ["| cell | policy | rule | seeds | " + " | ".join(COLUMNS) + " |", "|---" * 11 + "|"]
    lines += [_line(row) for row in results.rows]
    lines += _given_up(results.rows)
    PAGE.write_text(written + "\n".join(lines) + "\n", encoding="utf-8")


def _given_up(rows: list[dict[str, Any]]) -> list[str]:
    """Return the policies whose runs were given up, which count as 0, with the reason of one."""
    given_up = [row for row in rows if row["gave_up"]]
    if not given_up:
        return []
    lines = ["", "Given up, and counted as 0:", ""]
    return lines + [
        f"- {row['cell']}, {row['policy']}, {row['rule']}: {row['gave_up']}." for row in given_up
    ]


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    """Return ours beside the best baseline of each cell, over the seeds that both played."""
    by_cell: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_cell[row["cell"]].append(row)
    head = ["cell", "seeds", "ours", "best baseline", "its seeds", "ours / baseline on these"]
    head += ["attainment", "masked + thrown", "length bias"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cell, there in by_cell.items():
        ours = next((row for row in there if row["policy"] == "ours"), None)
        if ours is None:
            continue
        others = [row for row in there if row is not ours]
        beside = _best_of(others)
        waste = ours["masked"] + ours["thrown"]
        lines.append(
            f"| {cell} | {ours['seeds']} | {ours['efficiency']:.3f} {beside} "
            f"| {ours['attainment']:.3f} | {waste:.3f} | {ours['length_bias']:.3f} |"
        )
    return lines


def _best_of(baselines: list[dict[str, Any]]) -> str:
    """Return the columns on the baseline that is best against ours, seed by seed."""
    compared = [row for row in baselines if row["ours"] > 0 and row["efficiency"] > 0]
    if not compared:
        return "| | | "
    best = min(compared, key=lambda row: float(row["ours"]) / float(row["efficiency"]))
    return (
        f"| {best['efficiency']:.3f} {best['policy']}, {best['rule']} | {best['seeds']} "
        f"| {best['ours'] / best['efficiency']:.3f} "
    )


def _line(row: dict[str, Any]) -> str:
    names = [str(row[one]) for one in ("cell", "policy", "rule", "seeds")]
    return "| " + " | ".join([*names, *(f"{row[one]:.3f}" for one in COLUMNS)]) + " |"
