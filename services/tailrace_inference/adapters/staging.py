"""Parts that engines of other packages share: the model's folder, and updates as files in memory."""

import asyncio
import atexit
import contextlib
import fcntl
import gc
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.weights import TensorBytes
from tailrace.weights.background import in_background
from tailrace.weights.errors import SegmentSpaceError
from tailrace.weights.files import packed_header
from tailrace.weights.segment import NO_ROOM, default_folder
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.weights import WeightStage, host_bytes
from tailrace_inference.ports import EngineRefusalError, NamedTensor, NotStagedError
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)
T = TypeVar("T")

SERVER_PID = "TAILRACE_SERVER_PID"  # names this server to the processes of an engine
FOLLOWER_FOLDER = "TAILRACE_FOLLOWER_FOLDER"  # the versions, on a node that only computes
_WATCH_S = 1.0  # between two looks at the server
_KILL_S = 0.5  # between two kills of what a start begins
_FOLDER, _LOCK = "tailrace-weights-", "lock"
NUM_FILES = 2  # the version that is staged, and the one before


def end_with_server() -> None:
    """Ends this process, one of an engine, once its server is gone; else it would wait for ever."""
    server = psutil.Process(int(os.environ[SERVER_PID]))
    atexit.register(gc.freeze)  # else the end looks through all modules for garbage, for seconds
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()


def _end_with(server: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_S)
    os._exit(1)


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes and of all that they started."""
    total = 0.0
    for each in _families(pids):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def is_runnable(pids: Iterable[int]) -> bool:
    """Tells whether a thread of these processes, or of what they started, computes or would.

    A busy machine may give it no processor, or its disk may keep it.
    """
    for each in _families(pids):
        for task in Path(f"/proc/{each.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                if task.read_bytes().rpartition(b")")[2][1:2] in (b"R", b"D"):
                    return True
    return False


def _families(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            yield from (root, *root.children(recursive=True))


def kill_children(others: Collection[int] = ()) -> None:
    """Kills the processes of an engine; `others`: children of this process that are not."""
    for child in psutil.Process().children(recursive=True):
        if child.pid not in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


async def unless_failed(build: Callable[[], T], failure: asyncio.Future[Any]) -> T:
    """Runs `build` in a thread. If `failure` comes first, it raises that, and kills what was begun.

    It does so too if it is cancelled: the process could not end before its thread.
    """
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    building = asyncio.create_task(asyncio.to_thread(build))
    try:
        await asyncio.wait({building, failure}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_late = not building.done()
        while not building.done():  # it may begin more of them
            kill_children(others)
            await asyncio.wait({building}, timeout=_KILL_S)
    if is_late:
        failure.result()
    return building.result()


def named_dtype(content: dict[str, Any]) -> str:
    """The type of the weights that a `config.json` names, or bfloat16."""
    text = content | (content.get("text_config") or {})
    return str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")


def token_bytes(content: dict[str, Any], number_bytes: int) -> int:
    """Bytes of one token's keys and values, from a model's configuration; an upper bound."""
    content = {**content, **(content.get("text_config") or {})}
    heads = int(content.get("num_attention_heads") or 1)
    width = int(content.get("head_dim") or int(content.get("hidden_size") or 0) // heads)
    kv_heads = int(content.get("num_key_value_heads") or heads)
    return 2 * number_bytes * int(content.get("num_hidden_layers") or 1) * kv_heads * max(width, 32)


def write_model_folder(card: ModelCard, folder: Path) -> dict[str, Any]:
    """Writes the files of a model card without weights; returns the configuration, with its class."""
    config: dict[str, Any] = json.loads(card.config_json)
    if not config.get("architectures"):
        model_type = str(config.get("model_type", ""))
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        if name is None:
            raise EngineRefusalError(f"model_type {model_type!r} is unknown to transformers")
        config["architectures"] = [name]
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in card.tokenizer_files.items():
        (folder / file).write_bytes(content)
    return config


def max_sequence_tokens(config: InferenceConfig, card: ModelCard) -> int:
    """Longest sequence that the model and the settings allow."""
    limits = [limit for limit in (card.context_tokens, config.max_model_len) if limit]
    if not limits:
        raise EngineRefusalError("the model's config.json names no context length: set max_model_len")
    return min(limits)


class OwnFolder:
    """Folder in the host's memory with a lock that its process holds; it removes those of dead ones.

    It goes with its owner, at the latest with the process: a start that is refused leaves none.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root or default_folder()
        for path in root.glob(f"{_FOLDER}*"):
            _remove_if_abandoned(path)
        unnamed = Path(
            tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=root)
        )  # others see it once it is locked
        lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = unnamed.rename(root / unnamed.name.removeprefix("."))
        self._removal = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Removes the folder and what is in it; again it does nothing."""
        self._removal()


def _remove_own(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of the object
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(path: Path) -> None:
    gone_or_held = (FileNotFoundError, BlockingIOError, PermissionError)  # the last: another user's
    with contextlib.suppress(*gone_or_held), (path / _LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("weights of a dead server removed", path=str(path))
        shutil.rmtree(path, ignore_errors=True)


class HostStage:
    """Checks and merges updates like the torch engine, and keeps them as files in memory."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """`folder`: that of the model's configuration; `dtype`: type of the written weights."""
        skeleton = _skeleton(folder, dtype)
        embedding: Any = skeleton.get_input_embeddings()
        self.vocab_size = int(embedding.num_embeddings)
        self._skeleton = skeleton
        self._stage = WeightStage(skeleton, torch.device("cpu"))
        names: dict[int, str] = {}
        for name, target in self._stage.targets.items():
            names.setdefault(id(target), name)  # tied parameters are written once
        self._names = names
        self._unread = {names[each] for each in _beside_text(skeleton) if each in names}
        self._whole: dict[str, torch.Tensor] = {}  # the base of adapters
        self._files: list[Path] = []
        self._folder = OwnFolder()

    @property
    def base_version(self) -> int:
        """The base version for adapters; -1: none."""
        return self._stage.base_version

    def write(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None
    ) -> Path:
        """Writes the whole model as a checkpoint's file; raises `WeightMismatchError`."""
        staged = self._stage.load(tensors, policy_version, base_version)
        values = {
            self._names[id(target)]: value
            for target, value in zip(staged.targets, staged.values, strict=True)
        }
        if base_version is None:
            self._whole = values if self.base_version == policy_version else {}
        read = {name: each for name, each in (self._whole | values).items() if name not in self._unread}
        return self._write(policy_version, _as_in_checkpoints(self._skeleton, read))

    def _write(self, policy_version: int, values: dict[str, torch.Tensor]) -> Path:
        """Writes a file over the oldest: memory that is in use already costs half of fresh memory.

        Raises `SegmentSpaceError` without room for it.
        """
        path = self._folder.path / f"{policy_version}.safetensors"
        if path not in self._files and len(self._files) == NUM_FILES:
            self._files.pop(0).rename(path)
        self._files = [*(file for file in self._files if file != path), path]
        tensors = [
            TensorBytes(
                name, str(value.dtype).removeprefix("torch."), tuple(value.shape),
                host_bytes(value.contiguous()).data,
            )
            for name, value in sorted(values.items(), key=lambda item: -item[1].element_size())
        ]  # fmt: skip
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(packed_header(tensors, {}))
                for tensor in tensors:
                    file.write(tensor.data)
                file.truncate()
        except OSError as error:
            self._files.remove(path)
            path.unlink(missing_ok=True)  # a part of a version would take the room of the next
            if error.errno not in NO_ROOM:
                raise
            num_bytes = sum(tensor.data.nbytes for tensor in tensors)
            raise SegmentSpaceError(str(path.parent), num_bytes) from error
        return path

    def close(self) -> None:
        """Removes the files."""
        self._folder.remove()


class StagedEngine(ABC):
    """Parts of `Engine` that do not depend on the package: updates wait as files, calls have ids."""

    _stage: HostStage  # from the start on
    _staged: tuple[int, Path] | None = None  # policy version and file, until `apply`
    # Gives a version's file to the engine's other nodes; raises `NotStagedError`.
    _share: Callable[[int, Path], Awaitable[None]] | None = None

    @property
    def base_version(self) -> int:
        """See `Engine`."""
        return self._stage.base_version

    async def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """See `Engine`."""
        try:
            path = await in_background(self._stage.write, tensors, policy_version, base_version)
        except (ForeignCodeError, MemoryError, OSError, RuntimeError, SegmentSpaceError) as error:
            raise NotStagedError(policy_version, f"{type(error).__name__}: {error}") from error
        if self._share is not None:
            await self._share(policy_version, path)
        self._staged = policy_version, path

    def take_staged(self) -> tuple[int, Path]:
        """Returns the staged version and its file, once; `stage` must come before."""
        assert self._staged is not None, "apply without stage"
        staged, self._staged = self._staged, None
        return staged

    def abort_all(self) -> None:
        """See `Engine`."""
        for call_id in self.open_call_ids():
            self.abort(call_id)

    @abstractmethod
    def open_call_ids(self) -> list[str]:
        """Ids of the calls whose last chunk is not out."""

    @abstractmethod
    def abort(self, call_id: str) -> None:
        """See `Engine`."""


def _beside_text(model: Any) -> set[int]:
    """Ids of the parameters that tokens do not pass, in a model that also sees or hears."""
    if model.config.get_text_config() is model.config:
        return set()
    read = {
        id(each)
        for part in (model.get_decoder(), model.get_output_embeddings())
        for each in part.parameters()
    }
    return {id(each) for each in model.parameters()} - read


def _as_in_checkpoints(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names and in the shapes of the model's checkpoints, which engines load.

    Those of transformers may differ: all experts of a layer are one tensor there.
    """
    with foreign_code("transformers"):
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, values)
    return found


def _skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder's configuration without memory for its weights."""
    load: Any = AutoConfig.from_pretrained
    make: Any = AutoModelForCausalLM.from_config
    try:
        with foreign_code("transformers"), torch.device("meta"):
            return make(load(folder), dtype=dtype)
    except ForeignCodeError as error:
        raise EngineRefusalError(str(error)) from error
