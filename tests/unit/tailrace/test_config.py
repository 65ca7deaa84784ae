"""Strict decoding: what a user gets wrong is named, with the place and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tailrace.config import (
    Config,
    ConfigError,
    Endpoints,
    load_experiment,
    run_config,
    section_config,
)


class Inner(Config, frozen=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0


class Section(Config, frozen=True, kw_only=True):
    generating_args: Inner = Inner()
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}  # noqa: RUF012 - msgspec copies empty defaults


def test_an_unknown_top_level_key_names_file_key_and_closest_valid_key() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.yaml: unknown key 'max_step'; did you mean 'max_steps'"
    ):
        run_config({"exp_name": "a", "max_step": 3}, "run.yaml")


def test_a_misspelt_section_is_an_unknown_key_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'scheduler'"):
        run_config({"exp_name": "a", "shceduler": {}}, "run.yaml")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"generating_args": {"temprature": 1}}, "agents.generating_args.temprature"),
        ({"many": [{"temprature": 1}]}, "agents.many"),
        ({"by_name": {"x": {"temprature": 1}}}, "agents.by_name"),
    ],
)
def test_an_unknown_nested_key_names_its_path(content: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError) as raised:
        section_config({"agents": content}, "agents", Section, "run.yaml")
    assert place in str(raised.value)
    assert "did you mean 'temperature'" in str(raised.value)


def test_a_wrong_type_names_the_path_and_both_types() -> None:
    with pytest.raises(ConfigError, match=r"agents\.generating_args\.temperature.*float.*str"):
        section_config({"agents": {"generating_args": {"temperature": "hot"}}}, "agents", Section, "f")


def test_a_missing_section_means_all_defaults() -> None:
    assert section_config({}, "agents", Section, "f") == Section()
    assert section_config({"agents": None}, "agents", Section, "f") == Section()


@pytest.mark.parametrize("content", [False, 0, "", []])
def test_a_section_that_holds_no_keys_is_refused(content: object) -> None:
    with pytest.raises(ConfigError, match="f: agents: Expected `object`"):
        section_config({"agents": content}, "agents", Section, "f")


@pytest.mark.parametrize(
    "content",
    [
        {"exp_name": "has space"},
        {"exp_name": "dots.split.subjects"},
        {"exp_name": "a", "group_size": 0},
        {"exp_name": "a", "max_steps": -1},
        {"exp_name": "a", "max_staleness": -1},
        {},
    ],
)
def test_values_that_cannot_work_are_refused(content: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        run_config(content, "run.yaml")


@pytest.mark.parametrize("key", ["group_size", "groups_per_step", "logging_steps"])
def test_numbers_that_begin_at_one_are_named_where_they_do_not(key: str) -> None:
    for value in (0, -3):
        with pytest.raises(ConfigError, match=rf"run\.yaml.*{key} must be at least 1"):
            run_config({"exp_name": "a", key: value}, "run.yaml")


def test_unreadable_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_experiment(tmp_path / "missing.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_experiment(tmp_path / "broken.yaml")
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        load_experiment(tmp_path / "latin.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected keys"):
        load_experiment(tmp_path / "list.yaml")


def test_services_started_by_hand_are_told_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="TAILRACE_NATS_URL and TAILRACE_REDIS_URL not set"):
        Endpoints.from_env({})


def test_logs_go_to_the_runs_folder_or_where_they_are_wanted(tmp_path: Path) -> None:
    given = {"exp_name": "a", "output_dir": str(tmp_path)}
    assert run_config(given, "f").logs_dir == tmp_path / "a" / "logs"
    elsewhere = run_config(given | {"logging_dir": str(tmp_path / "logs")}, "f")
    assert elsewhere.logs_dir == tmp_path / "logs" / "a"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "f: the key `exp_name` is missing: give it"),
        ({"group_size": "four"}, "f: group_size: Expected `int`, got `str` ('four')"),
        ({"group_size": 4.5}, "f: group_size: Expected `int`, got `float` (4.5)"),
        ({"tracing": 3}, "f: tracing: Expected `object`, got `int` (3)"),
        ({"chat": {"tool_parser": 1}}, "f: chat.tool_parser: Expected `str`, got `int` (1)"),
    ],
)
def test_a_value_of_another_type_is_shown_and_a_missing_key_is_named(
    content: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config({"exp_name": "a", **content} if content else {}, "f")
    assert str(refused.value) == told


def test_unknown_keys_of_all_entries_are_named() -> None:
    content = {"s": {"inner": {"x": {"los": "dapo"}, "y": {"size": {}}}}}
    with pytest.raises(ConfigError) as refused:
        section_config(content, "s", Named, "f")
    assert "unknown key 's.inner.x.los'; did you mean 'loss'?" in str(refused.value)
    assert "unknown key 's.inner.y.size'; did you mean 'sizes'?" in str(refused.value)


def test_a_value_in_place_of_a_list_is_told_as_a_list() -> None:
    with pytest.raises(ConfigError, match=r"s\.tags: Expected `array`, got `str` \('a'\): .* \[a\]$"):
        section_config({"s": {"tags": "a"}}, "s", Listed, "f")


class Listed(Config, frozen=True, kw_only=True):
    tags: tuple[str, ...]


class Named(Config, frozen=True, kw_only=True):
    loss: Literal["ppo_clip", "dapo"] | None = None
    transports: tuple[Literal["nats", "zmq"], ...] = ()
    sizes: dict[str, Literal[1, 2]] = {}  # noqa: RUF012 - msgspec copies empty defaults
    inner: dict[str, Named] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"loss": "ppo"}, r"s\.loss: 'ppo' is none of dapo, ppo_clip; did you mean 'ppo_clip'\?$"),
        ({"loss": "dappo"}, r"s\.loss: 'dappo' is none of dapo, ppo_clip; did you mean 'dapo'\?$"),
        ({"loss": "zzz"}, r"s\.loss: 'zzz' is none of dapo, ppo_clip$"),
        ({"loss": ""}, r"s\.loss: '' is none of dapo, ppo_clip$"),
        ({"loss": False}, r"s\.loss: Expected `str.*`bool`; known are .*ppo_clip"),
        ({"transports": ["nats", "zmg"]}, r"s\.transports\[1\]: 'zmg' is none of .*did you mean 'zmq'"),
        ({"sizes": {"b": 1, "a": 3}}, r"s\.sizes\.a: 3 is none of 1, 2$"),
        ({"inner": {"y": {}, "x": {"loss": "dap"}}}, r"s\.inner\.x\.loss: 'dap' .*mean 'dapo'"),
        (
            {"inner": {"x": {"inner": {"y": {"sizes": {"z": 3}}}}}},
            r"s\.inner\.x\.inner\.y\.sizes\.z: 3 is",
        ),
        ({"sizes": {"a.b": 3}}, r"s\.sizes\[\.\.\.\]: 3 is none of 1, 2$"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_closest(
    content: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        section_config({"s": content}, "s", Named, "f")


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "nan is not a number"), (1 << 63, "64 bits"), (-(1 << 80), "64 bits")],
)
def test_numbers_that_nothing_can_use_are_named(value: float, reason: str) -> None:
    content = {"many": [{}, {"temperature": value}]}
    with pytest.raises(ConfigError, match=rf"agents\.many\[1\]\.temperature: .*{reason}"):
        section_config({"agents": content}, "agents", Section, "run.yaml")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"generating_args": {"temperature": "\ud800"}}, r"agents\.generating_args\.temperature"),
        ({"generating_args": {"\ud800": 1}}, r"agents\.generating_args\.\\ud800"),
        ({"generating_args": ["\udcff"]}, r"agents\.generating_args\[0\]"),
    ],
)
def test_half_of_a_character_is_named(content: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError, match=f"f: {place}: a text with half of a character") as caught:
        section_config({"agents": content}, "agents", Section, "f")
    str(caught.value).encode()
