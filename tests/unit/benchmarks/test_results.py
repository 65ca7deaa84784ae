from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.results import Results, commit_of


def test_the_file_says_machine_versions_rows_and_which_targets_hold(tmp_path: Path) -> None:
    results = Results("thing", ["msgspec", "no-such-package"], rounds=3)
    results.add(who="a", calls_per_s=12345.678)
    results.add(who="b", calls_per_s=1.0, commit="of yesterday")
    results.add_version("their-package", "7.0")
    results.at_least("speed-up", 6.5, 6)
    results.at_most("p99 share", 0.5, 1 / 3)
    content = json.loads(results.write(tmp_path).read_text())
    commit = results.commit
    assert content["rows"] == [
        {"who": "a", "calls_per_s": 12350.0, "commit": commit},
        {"who": "b", "calls_per_s": 1.0, "commit": "of yesterday"},
    ]
    assert content["versions"]["their-package"] == "7.0"
    assert content["settings"] == {"rounds": 3}
    assert content["versions"]["no-such-package"] == "not installed"
    assert content["machine"]["cores"] >= 1
    assert [target["holds"] for target in content["targets"]] == [True, False]
    assert content["targets"][1] == {
        "what": "p99 share",
        "value": 0.5,
        "goal": "<= 0.3333",
        "holds": False,
    }
    assert results.exit_code == 1


def test_the_table_has_every_column_and_row(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("thing", [])
    results.add(who="a", speed=1.5)
    results.add(who="b", cost=None, note="x")
    results.at_least("speed-up", 2, 1)
    results.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["who", "speed", "cost", "note"]
    assert lines[2].split() == ["a", "1.5"]
    assert lines[3].split() == ["b", "x"]
    assert lines[4].split()[0] == "holds"
    assert results.exit_code == 0


def test_the_commit_is_that_of_the_code_whatever_benchmarks_wrote(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""

    def git(*arguments: str) -> str:
        argv = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    git("init")
    git("add", "-A")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (results / "thing.json").write_text("{}")
    assert commit_of(results) == commit
    (tmp_path / "code.py").write_text("2")
    assert commit_of(results) == f"{commit}-dirty"
