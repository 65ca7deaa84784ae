"""Names below `tailrace.envs` lead to the package `tailrace_envs`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.config import ConfigError
from tailrace.import_path import load_object
from tailrace_envs import make_env
from tailrace_envs.frozen_lake_expert import demonstrations
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_envs.sokoban.environment import SokobanText


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tailrace.envs:make_env", make_env),
        ("tailrace.envs.frozen_lake_expert:demonstrations", demonstrations),
        (
            "tailrace.envs.frozen_lake_tokenizer:build_frozen_lake_tokenizer",
            build_frozen_lake_tokenizer,
        ),
        ("tailrace.envs.sokoban.environment:SokobanText", SokobanText),
        ("tailrace.envs.sokoban.environment.SokobanText", SokobanText),
    ],
)
def test_import_paths_of_experiments_resolve_to_the_same_objects(path: str, expected: object) -> None:
    assert load_object(path, "key") is expected


@pytest.mark.parametrize("path", ["tailrace.envs.nothing:name", "tailrace.envs.sokoban.nothing:name"])
def test_an_unknown_module_is_refused_by_key_and_name(path: str) -> None:
    with pytest.raises(ConfigError, match=r"key: cannot import 'tailrace\.envs\..*nothing'"):
        load_object(path, "key")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        load_object("tailrace.envs:nothing", "key")


def test_import_statements_work_in_a_fresh_process_and_make_no_second_class() -> None:
    program = (
        "from tailrace.envs.webshop.environment import WebShopText as A\n"
        "import tailrace.envs.game as game\n"
        "from tailrace.envs import FrozenLakeText\n"
        "from tailrace_envs.webshop.environment import WebShopText as B\n"
        "import tailrace_envs.game\n"
        "assert A is B and game is tailrace_envs.game and issubclass(A, game.TextGame)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
