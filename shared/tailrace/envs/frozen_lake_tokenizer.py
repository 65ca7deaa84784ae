"""A tokenizer for a model that knows nothing but FrozenLake, as Hugging Face files.

One token per grid row of four cells with its line feed, one per action word, one per role: a turn
is the user's marker, four rows, the assistant's marker (inserted), an action and the end of turn
(sampled) - eight tokens. Other text falls back to single characters where the vocabulary has them
(larger grids), else to `<|unk|>`, so every text can be encoded.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tailrace.envs.frozen_lake import ACTIONS, INVALID_NOTE

PAD, UNK, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|unk|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CELLS = "FHSGP"
CHARACTERS = (*CELLS, "\n", " ", ".")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def row_tokens() -> list[str]:
    """Every row that a grid of four columns can show: S only first, G only last, at most one P."""
    rows = ("".join(cells) + "\n" for cells in product(CELLS, repeat=4))
    return [row for row in rows if _can_occur(row)]


def _can_occur(row: str) -> bool:
    cells = row[:4]
    if cells.count("P") > 1 or ("S" in cells and "G" in cells):
        return False
    return cells.rfind("S") <= 0 and cells.find("G") in (-1, 3)


def build_frozen_lake_tokenizer(directory: str | Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`; `AutoTokenizer` loads the directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    words = [*row_tokens(), *ACTIONS, INVALID_NOTE, *CHARACTERS]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    pattern = rf"[{CELLS}]{{4}}\n|{'|'.join(ACTIONS)}|{re.escape(INVALID_NOTE)}|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=2), encoding="utf-8")
    return folder


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNK,
        "eos_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
