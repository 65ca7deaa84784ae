"""Files that a run starts from, read without torch: the model's, and the demonstrations' function.

The learner and the checks before a run (`tailrace validate`) both use this module.
"""

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from numpy.typing import NDArray

from tailrace.chat.model_files import TOKENIZER_FILES, model_folder, read_model_card
from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace.object_store import fetched, is_url
from tailrace_learner.config import FromScratch, WarmStart
from tailrace_protos.weights import ModelCard

TOKENIZER_KEY = "learner.from_scratch.tokenizer"
DEMONSTRATIONS_KEY = "learner.warm_start.demonstrations"

# Files of a model that say all about it but its weights.
_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "tokenizer*", "*.model")


def fetched_folder(name: str, key: str) -> Path:
    """Folder of a model's description: its own, or a copy from hub or object store, without weights.

    `ConfigError` names `key` and the remedy.
    """
    if is_url(name):
        return fetched(name, key, _DESCRIPTION)
    folder = model_folder(name, key)
    if folder is not None:
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=list(_DESCRIPTION)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        is_offline = isinstance(error, OSError) and not isinstance(error, HfHubHTTPError)
        raise ConfigError(
            f"{key}: {name} is no folder here, and the hub "
            + (
                f"cannot be asked ({reason}): check the network, or "
                if is_offline
                else f"does not give it ({reason}): correct the name, or "
            )
            + "name a folder with config.json, weights and tokenizer"
        ) from error


def scratch_card(scratch: FromScratch) -> ModelCard:
    """Model card of a model from scratch, with the keys of its configuration that the user gives."""
    content = {"model_type": scratch.model_type, **scratch.config}
    with tempfile.TemporaryDirectory(prefix="tailrace-tokenizer-") as folder:
        write_tokenizer(scratch, folder)
        if not (Path(folder) / TOKENIZER_FILES[0]).is_file():
            raise ConfigError(f"{TOKENIZER_KEY}: {scratch.tokenizer} wrote no {TOKENIZER_FILES[0]}")
        (Path(folder) / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return read_model_card(Path(folder))


def write_tokenizer(scratch: FromScratch, folder: str) -> None:
    """Lets the user's function write the tokenizer of a model from scratch."""
    build = load_object(scratch.tokenizer, TOKENIZER_KEY)
    try:
        with foreign_code(TOKENIZER_KEY):
            build(folder)
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error


def demonstration_pairs(warm: WarmStart, renderer: Any, seed: int, num_episodes: int) -> Iterator[Any]:
    """Iterator of the user's function; `ConfigError` if it cannot be called or fails."""
    make: Callable[..., Any] = load_object(warm.demonstrations, DEMONSTRATIONS_KEY)
    named = {"seed": seed, "num_episodes": num_episodes, **warm.options}
    try:
        inspect.signature(make).bind(renderer, **named)
    except TypeError as error:
        raise ConfigError(
            f"{DEMONSTRATIONS_KEY}: {warm.demonstrations} cannot be called with (renderer, "
            f"{', '.join(f'{name}=' for name in named)}): {error}: correct it, or warm_start.options"
        ) from error
    try:
        with foreign_code(DEMONSTRATIONS_KEY):
            return iter(make(renderer, **named))
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error


def demonstration_arrays(pair: Any, card: ModelCard) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Token ids [T] and mask [T] of one row; `ValueError` for a row that the model cannot read."""
    token_ids, loss_mask = (np.asarray(part) for part in pair)
    if token_ids.ndim != 1 or token_ids.shape != loss_mask.shape:
        raise ValueError(
            f"it yields token_ids of shape {token_ids.shape} with a loss_mask of shape "
            f"{loss_mask.shape}: a row is (token_ids, loss_mask), both of one length"
        )
    if 0 < card.context_tokens < len(token_ids):
        raise ValueError(
            f"it yields a row of {len(token_ids)} tokens, and the model reads {card.context_tokens}: "
            "yield shorter ones"
        )
    strange = token_ids[(token_ids < 0) | (token_ids >= (card.vocabulary or np.inf))]
    if len(strange):
        raise ValueError(
            f"it yields the token id {strange[0]}, which the model lacks: take ids from the renderer's "
            "tokenizer"
        )
    return token_ids.astype(np.int64), loss_mask.astype(np.uint8)
