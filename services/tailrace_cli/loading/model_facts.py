"""Sizes of a model from its files, without torch: config.json and the headers of safetensors."""

import importlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_cli.loading.facts import ModelFacts
from tailrace_protos.weights import CONTEXT_KEYS

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "model*.bin")
_PART = re.compile(r"-\d+-of-\d+\.\w+$")
_HEADER = struct.Struct("<Q")
_HEAD_NORMS = ("qwen3", "gemma3", "olmo2")


def model_facts(name: str, config_json: bytes, num_tokens: int = 0) -> ModelFacts:
    """Sizes that the configuration tells. `num_tokens`: the tokenizer's, if the file has no vocabulary.

    Keys that the file leaves out are asked of transformers, which takes seconds to import.
    """
    content = _text_part(json.loads(config_json))
    if not _has_sizes(content):
        content = _completed(content)
    hidden = _first(content, ("hidden_size", "n_embd", "d_model"))
    layers = _first(content, ("num_hidden_layers", "n_layer", "num_layers"))
    heads = _first(content, ("num_attention_heads", "n_head", "num_heads"))
    head_dim = _first(content, ("head_dim",)) or (hidden // heads if heads else 0)
    kv_heads = _first(content, ("num_key_value_heads",)) or heads
    vocab_size = _first(content, ("vocab_size",)) or num_tokens
    return ModelFacts(
        name=name,
        context_tokens=_first(content, CONTEXT_KEYS),
        num_parameters=_num_parameters(
            content, hidden, layers, (heads + kv_heads) * head_dim, vocab_size
        ),
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        hidden_size=hidden,
        num_layers=layers,
        kv_width=2 * layers * kv_heads * head_dim,
        attention_width=heads * head_dim,
        inner_size=_inner(content, hidden),
        num_tables=1 if content.get("tie_word_embeddings") else 2,
        has_head_norms=str(content.get("model_type", "")).startswith(_HEAD_NORMS),
        dtype=str(content.get("dtype") or content.get("torch_dtype") or "float32"),
    )


def counted_parameters(folder: Path, key: str) -> int:
    """Parameters in the safetensors files of a local model; 0 for files of another kind.

    `ConfigError` if the folder holds no weights, or lacks a file that its index names, or the index.
    """
    index = next((folder / name for name in _INDICES if (folder / name).is_file()), None)
    if index is not None:
        paths = [folder / name for name in sorted(_indexed(index, key))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ConfigError(
                f"{key}: {folder} lacks {missing[0]}, which {index.name} names: copy or download the "
                "model again"
            )
    else:
        paths = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
        _check_whole(folder, paths, key)
    return sum(_in_file(path, key) for path in paths if path.suffix == ".safetensors")


def _check_whole(folder: Path, paths: Sequence[Path], key: str) -> None:
    """Raises `ConfigError` for a folder without an index whose files cannot be loaded without one."""
    if not paths:
        raise ConfigError(
            f"{key}: {folder} holds no weights (model*.safetensors): copy the whole model"
        )
    if all(_PART.search(path.name) for path in paths):
        index = _INDICES[paths[0].suffix != ".safetensors"]
        raise ConfigError(
            f"{key}: {folder} holds {paths[0].name} without {index}, which lists all parts: copy or "
            "download the whole model"
        )


def _indexed(index: Path, key: str) -> set[str]:
    """Names of the files that an index of weights lists."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}: {index} has no readable weight_map: copy or download it again"
        ) from error
    return names


def _in_file(path: Path, key: str) -> int:
    """Parameters that the header of a file lists; `ConfigError` if the file is not whole."""
    try:
        with path.open("rb") as file:
            (size,) = _HEADER.unpack(file.read(_HEADER.size))
            header: dict[str, Any] = json.loads(file.read(min(size, path.stat().st_size)))
        header.pop("__metadata__", None)
        shapes = [entry["shape"] for entry in header.values()]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{key}: {path} is no safetensors file: copy or download it again") from error
    found, needed = path.stat().st_size, _HEADER.size + size + end
    if found < needed:
        raise ConfigError(f"{key}: {path} has {found:,} bytes of {needed:,}: copy or download it again")
    return sum(map(math.prod, shapes))


def _inner(content: Mapping[str, Any], hidden: int) -> int:
    active = _first(content, ("num_experts_per_tok", "num_selected_experts")) or 1
    return active * (
        _first(content, ("moe_intermediate_size", "intermediate_size", "n_inner")) or 4 * hidden
    )


def _text_part(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the part about text of a model that also reads other things."""
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, dict) else content


def _has_sizes(content: Mapping[str, Any]) -> bool:
    return bool(_first(content, CONTEXT_KEYS) and _first(content, ("hidden_size", "n_embd", "d_model")))


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """Adds the defaults of the architecture; `ConfigError` for one that transformers does not know."""
    auto: Any = importlib.import_module("transformers").AutoConfig
    given = {key: value for key, value in content.items() if key not in ("model_type", "text_config")}
    try:
        with foreign_code("transformers"):
            found: Any = auto.for_model(str(content.get("model_type", "")), **given)
    except ForeignCodeError as error:
        raise ConfigError(f"the model's config.json: {refusal(error.error, content)}") from error
    text = found.get_text_config()
    return {**text.to_dict(), **{key: getattr(text, key, None) for key in CONTEXT_KEYS}}


def refusal(error: Exception, content: Mapping[str, Any]) -> str:
    """Reason why transformers cannot read a config.json, and the remedy."""
    kind = content.get("model_type")
    if not kind:
        return "it names no model_type: copy or download it again"
    if "Unrecognized model" in str(error):
        version = importlib.import_module("transformers").__version__
        return (
            f"transformers {version} knows no model_type {kind!r}: correct it, or install a newer one"
        )
    return " ".join(str(error).split())


def _num_parameters(
    content: Mapping[str, Any], hidden: int, layers: int, attention_width: int, vocab_size: int
) -> int:
    """Rough number of a decoder: embeddings, and in each layer attention and feed-forward matrices."""
    inner = _first(content, ("moe_intermediate_size", "intermediate_size", "n_inner")) or 4 * hidden
    experts = _first(content, ("num_experts", "num_local_experts", "n_routed_experts")) or 1
    tables = 1 if content.get("tie_word_embeddings") else 2
    return hidden * (tables * vocab_size + layers * (2 * attention_width + 3 * inner * experts))


def _first(content: Mapping[str, Any], keys: Iterable[str]) -> int:
    found = (content.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)
