"""Reader of a model's files for chats: folder, tokenizer, template, tokens that end a text."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tailrace.chat.template import ChatTemplate, TemplateError
from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import looks_like_path
from tailrace.object_store import fetched, is_url
from tailrace_protos.weights import ModelCard

UNREAD = "of the model card"
"""Origin in the `TemplateError` of files that are missing or cannot be read."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_folder(name: str, key: str) -> Path | None:
    """Folder of a local model; None for a name of the hub, or a URL of an object store.

    `ConfigError` names `key` and the remedy.
    """
    if is_url(name):
        return None
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{key}: {name} holds adapters (adapter_config.json), which are not read: name a "
                "folder in which they are merged with their model"
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{key}: {name} is no model directory (it holds no config.json): give the folder of a "
                "Hugging Face model"
            )
        _check_config(folder / "config.json", key)
        return folder
    if looks_like_path(name) or folder.is_file():
        found = "is a file" if folder.is_file() else "does not exist"
        raise ConfigError(
            f"{key}: {name} is no model directory (it {found}): correct the path, or name a model of "
            "the hub as owner/name"
        )
    return None


class Vocabulary(NamedTuple):
    """Tokens of a model. `num_vectors`: rows of its embeddings, often more than tokens; 0: unknown."""

    ids: Mapping[str, int]
    num_vectors: int


def check_same_tokens(key: str, source: str, ours: Vocabulary, theirs: Vocabulary) -> None:
    """Raise `ConfigError` unless the model `source` reads every token that ours writes as ours does.

    It may know more tokens.
    """
    for token, token_id in ours.ids.items():
        if (found := theirs.ids.get(token)) != token_id:
            raise ConfigError(
                f"{key}: the policy's token {token_id}, {token!r}, is "
                + (f"none of {source}" if found is None else f"token {found} of {source}")
                + ": use a model with the policy's tokenizer"
            )
    if theirs.num_vectors and theirs.num_vectors < ours.num_vectors:
        raise ConfigError(
            f"{key}: {source} has vectors for {theirs.num_vectors} tokens and the policy for "
            f"{ours.num_vectors}: use a model that has as many"
        )


def _check_config(path: Path, key: str) -> None:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}: copy or download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{key}: {path} holds a {type(content).__name__}, not an object: copy or download it again"
        )


def present_folder(name: str, key: str) -> Path | None:
    """Folder of a local model, or of one fetched from an object store; None for a name of the hub."""
    return fetched(name, key) if is_url(name) else model_folder(name, key)


def read_model_card(folder: Path) -> ModelCard:
    """Reads the model card of a Hugging Face model directory."""
    present = (name for name in TOKENIZER_FILES if (folder / name).is_file())
    files = {name: (folder / name).read_bytes() for name in present}
    return ModelCard((folder / "config.json").read_bytes(), files)


class ChatModel(NamedTuple):
    """Tokenizer with its template; `eos_token_ids`: all ids that the files name."""

    tokenizer: Tokenizer
    template: ChatTemplate
    eos_token_ids: tuple[int, ...]


def read_chat_model(card: ModelCard, template_args: Mapping[str, Any]) -> ChatModel:
    """Reads the files of the model card; `TemplateError` names what is missing or unusable."""
    files = card.tokenizer_files
    tokenizer = _tokenizer(files)
    with _reading("tokenizer_config.json"):
        config: dict[str, Any] = {**json.loads(files.get("tokenizer_config.json", b"{}"))}
    special = _special_tokens(config)
    template = _template(files, config, {**special, **template_args})
    return ChatModel(tokenizer, template, _eos_token_ids(card, tokenizer, special))


def card_tokens(card: ModelCard) -> dict[str, int]:
    """Ids of the tokens of the model card's tokenizer; `TemplateError` if it cannot be read."""
    return _tokenizer(card.tokenizer_files).get_vocab()


def _tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise TemplateError(UNREAD, "tokenizer.json is missing: save a fast tokenizer beside the model")
    with _reading("tokenizer.json"):
        return Tokenizer.from_str(files["tokenizer.json"].decode())


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns an error of the body into a `TemplateError` that names the file."""
    try:
        with foreign_code(name):
            yield
    except ForeignCodeError as error:
        found = f"{type(error.error).__name__}: {error.error}"
        raise TemplateError(
            UNREAD, f"cannot read {name}: {found}: copy or download it again"
        ) from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens such as `bos_token`; the config has texts, or objects with `content`."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _template(files: dict[str, bytes], config: dict[str, Any], names: dict[str, Any]) -> ChatTemplate:
    if "chat_template.jinja" in files:
        with _reading("chat_template.jinja"):
            text = files["chat_template.jinja"].decode()
        return ChatTemplate(text, names, "chat_template.jinja")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        with _reading("chat_template of tokenizer_config.json"):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise TemplateError(
            UNREAD,
            "the model has none: put chat_template.jinja, or the key chat_template of "
            "tokenizer_config.json, beside the model",
        )
    return ChatTemplate(source, names, "of tokenizer_config.json")


def _eos_token_ids(card: ModelCard, tokenizer: Tokenizer, special: dict[str, str]) -> tuple[int, ...]:
    """Ids that end a text, from the tokenizer's and the model's config."""
    ids: list[int] = []
    if "eos_token" in special:
        token_id = tokenizer.token_to_id(special["eos_token"])
        ids += [] if token_id is None else [token_id]
    of_model = json.loads(card.config_json).get("eos_token_id") if card.config_json else None
    if isinstance(of_model, int):
        ids.append(of_model)
    elif isinstance(of_model, list):
        ids.extend(of_model)
    return tuple(ids)


class SpecialTokens:
    """Added tokens. `ids`: special tokens' ids by text. `texts`: all added tokens' texts by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each special token in `text`, in order."""
        return [found.span() for found in self._pattern.finditer(text)]

    def end_of_one_at(self, text: str, position: int) -> int:
        """End of the special token that starts at `position`; `position` if there is none."""
        found = self._pattern.match(text, position)
        return found.end() if found else position
