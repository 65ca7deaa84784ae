"""Folders on object stores: in memory, on a disk and, with `make test-s3`, on an S3 server."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tailrace import object_store
from tailrace.chat.model_files import model_folder, present_folder
from tailrace.config import ConfigError
from tailrace.object_store import ObjectStoreError, StoredFolder, fetched, is_url

has_s3 = importlib.util.find_spec("s3fs") is not None and importlib.util.find_spec("moto") is not None


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """Address of an S3 server."""
    command = [sys.executable, "-m", "moto.server", "-p", "0", "-H", "127.0.0.1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    address = next(line for line in process.stderr if "Running on" in line).split()[-1]
    yield address
    process.kill()
    process.wait()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty folder."""
    monkeypatch.setattr(object_store, "_PAUSE_S", 0.0)
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path / "state"))
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}/runs"
    if request.param == "file":
        return f"file://{tmp_path}/store/runs"
    if not has_s3:
        pytest.skip("s3fs and moto are not here: make test-s3")
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/runs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name, text in (("config.json", "{}"), ("weights.bin", "x" * 100_000), ("state.json", "last")):
        (made / name).write_text(text)
    return made


def test_a_folder_goes_up_and_comes_back_whole(url: str, folder: Path, tmp_path: Path) -> None:
    stored = StoredFolder(f"{url}/step_1", "key")
    assert stored.names() == {}
    stored.upload(folder, last="state.json")
    assert stored.names() == {"config.json": 2, "state.json": 4, "weights.bin": 100_000}
    assert stored.read("state.json") == b"last"
    back = stored.download(tmp_path / "back")
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_folder_that_is_sent_again_has_no_file_of_before(url: str, folder: Path) -> None:
    stored = StoredFolder(url, "key")
    stored.upload(folder, last="state.json")
    (folder / "weights.bin").unlink()
    stored.upload(folder, last="state.json")
    assert set(stored.names()) == {"config.json", "state.json"}


def test_an_interrupted_download_goes_on_with_the_files_that_miss(
    url: str, folder: Path, tmp_path: Path
) -> None:
    stored = StoredFolder(url, "key")
    stored.upload(folder, last="state.json")
    part = tmp_path / ".part-back"
    part.mkdir()
    (part / "weights.bin").write_text("y" * 100_000)  # there already
    (part / "config.json").write_text("{")  # torn
    back = stored.download(tmp_path / "back")
    assert (back / "weights.bin").read_text()[0] == "y"
    assert (back / "config.json").read_text() == "{}"


def test_a_model_is_fetched_once(url: str, folder: Path) -> None:
    StoredFolder(url, "key").upload(folder, last="config.json")
    assert model_folder(url, "pretrain") is None, "checks of an experiment fetch nothing"
    found = present_folder(url, "pretrain")
    assert found is not None
    StoredFolder(url, "key").delete(["weights.bin"])
    assert (fetched(url, "pretrain") / "weights.bin").is_file()


def test_a_model_that_is_not_there_names_key_and_url(url: str) -> None:
    with pytest.raises(ConfigError, match=f"pretrain: cannot fetch {url}/none"):
        fetched(f"{url}/none", "pretrain")


def test_an_unknown_protocol_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"learner\.checkpoint_url: cannot use nowhere://x"):
        StoredFolder("nowhere://x", "learner.checkpoint_url")


def test_a_store_without_its_package_names_the_extra() -> None:
    if importlib.util.find_spec("s3fs") is not None:
        pytest.skip("s3fs is here: make test runs this without it")
    with pytest.raises(ConfigError, match=r"tailrace\[s3\]"):
        StoredFolder("s3://bucket/x", "pretrain")


class FlakyFiles:
    """A file system whose first calls fail."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_calls = 0

    def cat_file(self, path: str) -> bytes:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise TimeoutError("slow")
        return path.encode()


@pytest.mark.parametrize(("num_failures", "is_read"), [(2, True), (3, False)])
def test_failures_that_pass_are_tried_again(
    num_failures: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PAUSE_S", 0.0)
    stored = StoredFolder("memory://x", "key")
    files = FlakyFiles(num_failures)
    stored._files = files
    if is_read:
        assert stored.read("a").endswith(b"/a")
    else:
        with pytest.raises(ObjectStoreError, match="memory://x: TimeoutError: slow"):
            stored.read("a")
    assert files.num_calls == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("s3://b/x", True),
        ("owner/name", False),
        ("/models/x", False),
        ("C:/x", False),
        ("gs://b", True),
    ],
)
def test_urls_are_told_from_paths_and_names(name: str, expected: bool) -> None:
    assert is_url(name) is expected


def test_the_cache_is_of_the_state_folder_or_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TAILRACE_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fsspec.filesystem("memory").pipe_file("/cached/config.json", b"{}")
    found = fetched("memory://cached", "pretrain")
    assert found.is_relative_to(tmp_path / "tailrace")
    assert os.listdir(found) == ["config.json"]
