"""Settings that take one of several names: an unknown one is answered by the known ones, everywhere."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.config import SECTIONS, Config, ConfigError, RunConfig, decode_config
from tailrace_cli.experiment import Experiment, load

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
KINDS = typing.get_type_hints(Experiment)


def places(info: Any) -> Iterator[tuple[Any, list[Any]]]:
    """A function that wraps a value into what leads to it, and the names known there."""
    if isinstance(info, msgspec.inspect.LiteralType):
        yield lambda value: value, list(info.values)
    for inner, into in inside(info):
        for wrap, names in places(inner):
            yield lambda value, wrap=wrap, into=into: into(wrap(value)), names


def inside(info: Any) -> Iterator[tuple[Any, Any]]:
    """The types within a type, and what makes its value of a value of theirs."""
    yield from ((each, lambda value: value) for each in getattr(info, "types", ()))
    for field in getattr(info, "fields", ()):
        yield field.type, lambda value, key=field.encode_name: {key: value}
    if (value_type := getattr(info, "value_type", None)) is not None:
        yield value_type, lambda value: {"x": value}
    if (item_type := getattr(info, "item_type", None)) is not None:
        yield item_type, lambda value: [value]


def cases() -> Iterator[Any]:
    kinds: list[tuple[str, type[Config]]] = [("", RunConfig), *((s, KINDS[s]) for s in SECTIONS)]
    for section, kind in kinds:
        for wrap, names in places(msgspec.inspect.type_info(kind)):
            yield pytest.param(section, kind, wrap, names, id=f"{section}-{wrap('')}")


ALL = list(cases())


def test_sections_with_names_are_all_looked_at() -> None:
    sections = {case.values[0] for case in ALL}
    assert sections >= {"", "agents", "inference", "learner", "reward", "cluster"}


@pytest.mark.parametrize(("section", "kind", "wrap", "names"), ALL)
def test_an_unknown_name_lists_all_known_ones_and_the_closest(
    section: str, kind: type[Config], wrap: Any, names: list[Any]
) -> None:
    is_text = isinstance(names[-1], str)
    wrong = f"{names[-1]}x" if is_text else max(names) + 1
    with pytest.raises(ConfigError) as raised:
        decode_config(wrap(wrong), kind, "run.yaml", where=section)
    message = str(raised.value)
    assert message.startswith(f"run.yaml: {section}")
    listed = message.partition(f"{wrong!r} is none of ")[2].partition(";")[0]
    assert listed == ", ".join(sorted(map(str, names)))
    assert ("did you mean" in message) == is_text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.adv_estimator=gigpoo", r"learner\.adv_estimator: 'gigpoo' is none of .*'gigpo'\?"),
        ("learner.loss=grpoo", r"learner\.loss: 'grpoo' is none of .*did you mean 'grpo'\?"),
        ("inference.kv_on_update=recompte", r"inference\.kv_on_update: 'recompte' .*'recompute'\?"),
        ("inference.transports=[zqm]", r"inference\.transports\[0\]: 'zqm' is none of nats, zmq; did"),
    ],
)
def test_an_experiment_with_an_unknown_name_is_answered_so(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(EXAMPLE, [override])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "actor_rollout_ref.rollout.n=8",
            "verl FILE`.*; actor_rollout_ref.rollout.n is group_size here",
        ),
        (
            "data.train_batch_size=64",
            "'data', which is of verl.*data.train_batch_size is groups_per_step",
        ),
        ("critic.optim.lr=1e-5", "'critic.optim', which is of verl"),
        (
            "rollout_batch_size=4",
            "of ROLL: `tailrace import-config roll FILE`.* is groups_per_step here",
        ),
        ("gconfig.n_samples=4", "of AReaL: `tailrace import-config areal FILE`.* is group_size here"),
        ("rollout.consumer_batch_size=4", "of AReaL"),
        ("trainer={a: 1, total_epochs: 2, save_freq: 3}", "trainer.save_freq is save_steps here"),
    ],
)
def test_a_setting_of_another_system_points_to_its_translation(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(EXAMPLE, [override])


def test_a_name_of_no_other_system_points_to_none() -> None:
    for override in ("foo.bar=1", "max_step=3", "learner.gama=1"):
        with pytest.raises(ConfigError, match="unknown key") as refused:
            load(EXAMPLE, [override])
        assert "import-config" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["areal_ppo", "verl_grpo", "roll_agentic", "roll_steps", "shapes/roll/lake_shared"]
)
def test_a_whole_file_of_another_system_points_to_its_translation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUM_CPUS_OF_THE_HEAD_NODE", "8")
    system = "roll" if "roll" in name else name.partition("_")[0]
    path = Path(__file__).parent / "importing" / f"{name}.yaml"
    with pytest.raises(ConfigError, match=f"tailrace import-config {system} {path} -o") as refused:
        load(path)
    assert str(refused.value).count(f"{path} -o") == 1


def test_a_file_of_roll_whose_parts_are_elsewhere_points_to_its_translation(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "importing" / "roll_agentic.yaml").read_text()
    path = tmp_path / "lake.yaml"
    path.write_text(f"defaults:\n  - ../config/deepspeed_zero@_here_\n{text}")
    with pytest.raises(ConfigError, match=f"deepspeed_zero.*tailrace import-config roll {path} -o"):
        load(path)
