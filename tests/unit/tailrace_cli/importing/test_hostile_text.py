"""Growing hostile text: files and words of other systems are read or refused in linear time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace.cpu_limit import cpu_limit
from tailrace_cli.importing.source import read_source

NUM_CHARS = 1_500  # Hydra's grammar needs a quarter of a second for the slowest of these
HANG_S = 20.0  # of the processor; what does not end needs far more
PIECES = (
    *("a=", "a.", "a.a=1 ", "+", "++a", "~a", "~", "${", "${a}", "$(", "`", "[", "]", "{", "}", "{a:"),
    *(
        "(",
        ")",
        "'",
        '"',
        "\\",
        "\\'",
        ",",
        ":",
        "a: ",
        "- ",
        "&a ",
        "*a ",
        "#",
        "@",
        "--config",
        "-cn ",
    ),
    *("=", " ", "1", "\t", "python3 -m x ", "$a", "oc.select:", "é", "\n", "a\n", "a=1\n", "a: {\n"),
    *("%s", "!!x ", "|\n ", "? "),
)
BEGINS = ("", "a=", "a: ", "a=[")


@pytest.mark.parametrize("form", ["words", "file.txt", "file.yaml"])
def test_hostile_text_is_read_or_refused_in_time(form: str, tmp_path: Path) -> None:
    """Repeated pieces, alone and behind a beginning."""
    num_refused = 0
    for piece in PIECES:
        for begin in BEGINS:
            text = begin + piece * (NUM_CHARS // len(piece))
            words = [text, text]
            if form != "words":
                (tmp_path / form).write_text(text)
                words = [str(tmp_path / form)]
            with cpu_limit(HANG_S):
                try:
                    read_source(words)
                except ConfigError:
                    num_refused += 1
    assert num_refused, "no other error, and some text that cannot be read"
