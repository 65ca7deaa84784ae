"""Tokenizers of a few hundred words for tiny models of one game, as Hugging Face files.

The game lists its words. Text between words is split into single characters, and a character outside of
the vocabulary is `<|unk|>`, so that every text can be encoded. The chat template marks each role by one
token and ends the assistant's turn with `<|end|>`.
"""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

PAD, UNK, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|unk|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

ENDING = "##"  # begins tokens that continue a word

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_word_tokenizer(
    directory: str | Path,
    words: Iterable[str],
    *,
    pattern: str,
    max_length: int,
    drops_spaces: bool = False,
    endings: Collection[str] = (),
) -> Path:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `AutoTokenizer` loads the directory.

    `pattern` (a regular expression) finds words in a text. With `drops_spaces`, runs of spaces are not
    encoded, letters become lower case, and decoding separates words by one space. Without it, decoding
    restores the text. `endings` continue a word: one that is not among `words` is its longest beginning
    that is, then endings. They need `drops_spaces`.
    """
    assert drops_spaces or not endings, "only a decoder that adds spaces knows where words end"
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = (*SPECIAL_TOKENS, *words, *(f"{ENDING}{one}" for one in endings))
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=UNK, continuing_subword_prefix=ENDING)
        if endings
        else models.WordLevel(vocabulary, unk_token=UNK)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    split = pre_tokenizers.Split(Regex(rf"{pattern}|[\s\S]"), behavior="isolated")
    if drops_spaces:
        tokenizer.normalizer = normalizers.Lowercase()
        blanks = pre_tokenizers.Split(Regex("^ +$"), behavior="removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, blanks])
        if endings:
            tokenizer.decoder = decoders.WordPiece(ENDING, cleanup=False)
    else:
        tokenizer.pre_tokenizer = split
        tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_config(max_length), indent=2)
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return folder


def any_of(words: Iterable[str]) -> str:
    """Pattern of these words, longer ones first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


def _config(max_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNK,
        "eos_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
