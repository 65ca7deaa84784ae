"""Updates as files in memory, for engines of other packages."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tailrace.weights import TensorBytes
from tailrace.weights.errors import SegmentSpaceError
from tailrace_inference.adapters.staging import (
    HostStage,
    OwnFolder,
    is_runnable,
    unless_failed,
    write_model_folder,
)
from tailrace_inference.ports import EngineFailedError, WeightMismatchError
from tailrace_learner.adapters import hf_model
from tailrace_protos.weights import ModelCard
from tests.contract.engine.harness import make_card, make_model, weights_of
from tests.models.zoo import make_model as make_zoo_model


@pytest.fixture
def stage(tmp_path: Path) -> HostStage:
    card: ModelCard = make_card()
    write_model_folder(card, tmp_path)
    return HostStage(tmp_path, torch.bfloat16)


def test_each_file_holds_its_version_in_the_engine_s_type_and_the_oldest_memory_is_used_again(
    stage: HostStage,
) -> None:
    inodes = []
    for version in range(5):
        model = make_model(version)
        path = stage.write(iter(weights_of(model)), version, None)
        found = load_file(path)
        assert set(found) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter.detach().to(torch.bfloat16))
        inodes.append(path.stat().st_ino)
        assert len(list(path.parent.glob("*.safetensors"))) <= 2
    assert inodes[2:] == [inodes[0], inodes[1], inodes[0]]
    stage.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3", "llama4"])
def test_a_file_is_that_of_the_model_s_checkpoints_without_what_only_sees(
    name: str, tmp_path: Path
) -> None:
    """Transformers keeps the experts of a layer in one tensor; engines load checkpoints."""
    model = make_zoo_model(name)
    model.save_pretrained(tmp_path)
    stage = HostStage(tmp_path, torch.float32)
    weights = (hf_model.tensor_bytes(*each, "float32") for each in hf_model.named_weights(model))
    found = load_file(stage.write(weights, 0, None))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[each], saved[each]) for each in found)
    unread = {each.partition(".")[0] for each in set(saved) - set(found)}
    assert unread == ({"vision_tower", "multi_modal_projector"} if name == "gemma3" else set())
    assert any(".experts." in each for each in found) == (name != "gemma3")
    stage.close()


def test_adapters_are_merged_into_the_file(stage: HostStage) -> None:
    model = make_model(0)
    layer = "model.layers.0.self_attn.q_proj"
    weight = dict(model.named_parameters())[f"{layer}.weight"].detach()
    generator = np.random.default_rng(0)
    down = generator.normal(size=(2, weight.shape[1])).astype(np.float32)
    up = generator.normal(size=(weight.shape[0], 2)).astype(np.float32)

    def adapters(scale: float) -> list[TensorBytes]:
        parts = {"lora_A": down, "lora_B": (scale * up).astype(np.float32)}
        return [
            TensorBytes(f"{layer}.{kind}.weight", "float32", part.shape, memoryview(part).cast("B"))
            for kind, part in parts.items()
        ]

    base = weights_of(model)
    stage.write(iter([*base, *adapters(0.0)]), 0, None)
    stage.write(iter(adapters(1.0)), 1, 0)
    found = load_file(stage.write(iter(adapters(2.0)), 2, 0))
    merged = (weight.to(torch.bfloat16).float() + torch.tensor(2.0 * up @ down)).to(torch.bfloat16)
    assert torch.equal(found[f"{layer}.weight"], merged)
    other = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found[other], dict(model.named_parameters())[other].detach().to(torch.bfloat16))
    stage.close()


def test_an_update_that_does_not_fit_writes_no_file(stage: HostStage) -> None:
    path = stage.write(iter(weights_of(make_model(0))), 0, None)
    with pytest.raises(WeightMismatchError, match="missing"):
        stage.write(iter(weights_of(make_model(1))[1:]), 1, None)
    assert [each.name for each in path.parent.glob("*.safetensors")] == [path.name]
    stage.close()


def test_a_version_without_room_is_told_and_its_part_makes_room_for_the_next(stage: HostStage) -> None:
    path = stage.write(iter(weights_of(make_model(0))), 0, None)
    (path.parent / "1.safetensors").symlink_to("/dev/full")  # writes to it find no space
    with pytest.raises(SegmentSpaceError, match=rf"no room for \d+ bytes of weights in {path.parent}"):
        stage.write(iter(weights_of(make_model(1))), 1, None)
    assert [each.name for each in path.parent.glob("*.safetensors")] == [path.name]
    fresh = stage.write(iter(weights_of(make_model(2))), 2, None)
    assert sorted(each.name for each in path.parent.glob("*.safetensors")) == [path.name, fresh.name]
    stage.close()


@pytest.mark.parametrize("fails", [True, False])
async def test_an_engine_that_still_starts_is_killed_when_the_server_fails_or_stops(
    fails: bool,
) -> None:
    """The thread in which it starts would hold the process until the end of the start."""
    failure = asyncio.get_running_loop().create_future()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    others = {each.pid for each in psutil.Process().children()}
    starting = asyncio.create_task(unless_failed(lambda: subprocess.run(command, check=False), failure))
    async with asyncio.timeout(120):
        while not {each.pid for each in psutil.Process().children()} - others:
            await asyncio.sleep(0.01)
        if fails:
            failure.set_exception(EngineFailedError("a node is lost"))
        else:
            starting.cancel()
        with pytest.raises(EngineFailedError if fails else asyncio.CancelledError):
            await starting
        assert not {each.pid for each in psutil.Process().children()} - others


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    refused = OwnFolder(tmp_path)  # by an engine whose start was refused
    (refused.path / "config.json").write_text("{}")
    del refused
    assert not list(tmp_path.iterdir())


def test_versions_go_where_there_is_room_for_them_without_a_writable_dev_shm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert OwnFolder().path.parent == tmp_path


def test_a_fork_leaves_the_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnFolder(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    own.remove()
    assert list(tmp_path.iterdir()) == [own.path]


def test_a_server_starts_beside_one_of_another_user() -> None:
    root = Path(tempfile.mkdtemp())
    root.chmod(0o1777)  # as /dev/shm
    theirs = root / "tailrace-weights-1"
    theirs.mkdir(mode=0o000)
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        own = OwnFolder(root)
        assert set(root.iterdir()) == {theirs, own.path}
        own.remove()
    finally:
        if is_root:
            os.seteuid(0)
    assert list(root.iterdir()) == [theirs]
    shutil.rmtree(root)


_OF_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize(
    ("code", "is_busy"),
    [("while True: pass", True), (_OF_A_CHILD, True), ("import time; time.sleep(600)", False)],
    ids=["computes", "its-child-computes", "waits"],
)
def test_a_process_is_runnable_while_it_would_compute(code: str, is_busy: bool) -> None:
    """Also one that gets no processor: only one that waits, or is stopped, may hang."""
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            deadline_s = time.monotonic() + 60.0
            while is_runnable([process.pid]) != is_busy and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert is_runnable([process.pid]) == is_busy
            os.killpg(process.pid, signal.SIGSTOP)
            while is_runnable([process.pid]) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert not is_runnable([process.pid])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert not is_runnable([process.pid])
