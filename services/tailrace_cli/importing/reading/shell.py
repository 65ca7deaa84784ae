"""Commands of a shell script, as words; no shell is run.

A variable stands for the literal that the script assigns to it, `$HOME` for `~`. What only a shell
could know (`$(...)`, variables of the environment, one with two values) stays as it is written, and the
word names it. Invariant: no word is dropped but comments and redirections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Word(NamedTuple):
    """A word as a command gets it."""

    text: str
    unknown: tuple[str, ...] = ()  # what of it only a shell could know


_VARIABLE = r"\$\w+|\$[@*\#?$!-]|\$\{[^}]*\}|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)"
_TOKEN = re.compile(
    rf"""
      (?P<joined> \\\n )
    | (?P<array> "?\$\{{(?P<name>\w+)\[[@*]\]\}}"? )
    | (?P<escaped> \\. )
    | (?P<single> '[^']*' )
    | (?P<double> "(?:\\.|[^"\\])*" )
    | (?P<variable> {_VARIABLE} )
    | (?P<redirect> \d*[<>]+&?\d* )
    | (?P<end> \n|;|&&|\|\|?|& )
    | (?P<space> [ \t\r]+ )
    | (?P<comment> (?<![^\s;&|(])\#[^\n]* )
    | (?P<bracket> [()] )
    | (?P<plain> [^\s\\'"$`;&|<>()]+? (?=[\s\\'"$`;&|<>()]|\d[<>]|$) | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_INSIDE = re.compile(rf"\\(?P<escaped>[\"\\$`])|\\\n|(?P<variable>{_VARIABLE})")
_NAMED = re.compile(r"\$\{?(?P<name>\w+)(?P<rest>[^}]*)\}?")
_DEFAULT = re.compile(r":?-(?P<value>[^$`]*)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_BEFORE_ASSIGNMENTS = ("export", "declare", "local", "readonly", "then", "else", "do", "-x", "-a", "-r")


def commands(text: str) -> list[list[Word]]:
    """All commands of a script with their words, those that assign variables too."""
    reader = _Reader()
    for token in _TOKEN.finditer(text):
        reader.take(token)
    reader.end()
    return reader.commands


@dataclass
class _Reader:
    """Words so far, and the variables that they may use."""

    commands: list[list[Word]] = field(default_factory=list)
    _words: list[Word] = field(default_factory=list)
    _word: Word | None = None
    _array: str = ""  # the variable whose parenthesis is open
    _variables: dict[str, list[Word] | None] = field(default_factory=lambda: {"HOME": [Word("~")]})
    _assigned: set[str] = field(default_factory=set)

    def take(self, token: re.Match[str]) -> None:
        """The next token of the script."""
        kind = next(name for name in _KINDS if token[name] is not None)
        _KINDS[kind](self, token[0], token)

    def skip(self, _text: str, _token: re.Match[str]) -> None:
        """A line that goes on, a comment."""

    def space(self, _text: str, _token: re.Match[str]) -> None:
        """The word is complete; a line ends without effect inside of an array."""
        if self._word is not None:
            self._words.append(self._word)
            self._word = None

    def literal(self, text: str, _token: re.Match[str]) -> None:
        """Characters that stand for themselves."""
        self._add(Word(text))

    def escaped(self, text: str, _token: re.Match[str]) -> None:
        """A character behind a backslash."""
        self._add(Word(text[1:]))

    def single(self, text: str, _token: re.Match[str]) -> None:
        """Nothing is replaced between single quotes."""
        self._add(Word(text[1:-1]))

    def double(self, text: str, _token: re.Match[str]) -> None:
        """Variables are replaced between double quotes."""
        inner, end = text[1:-1], 0
        self._add(Word(""))
        for found in _INSIDE.finditer(inner):
            self._add(Word(inner[end : found.start()]))
            end = found.end()
            if found["variable"] is not None:
                self._add(self._value(found["variable"]))
            else:
                self._add(Word(found["escaped"] or ""))
        self._add(Word(inner[end:]))

    def variable(self, text: str, _token: re.Match[str]) -> None:
        """A variable, or another replacement, outside of quotes."""
        self._add(self._value(text))

    def array(self, text: str, token: re.Match[str]) -> None:
        """All words of an array."""
        values = self._variables.get(token["name"])
        if values is None:
            self._add(Word(text, (text.strip('"'),)))
            return
        self.space(text, token)
        self._words += values

    def redirect(self, text: str, token: re.Match[str]) -> None:
        """Where output goes: no word."""
        self.space(text, token)

    def bracket(self, text: str, token: re.Match[str]) -> None:
        """An array's words, or a subshell."""
        opens = _ASSIGNED.fullmatch(self._word.text) if self._word is not None else None
        if text == "(" and opens is not None and not opens["value"]:
            self._array, self._word = opens["name"], None
        elif text == ")" and self._array:
            self.space(text, token)
            self._assign(self._array, self._words)
            self._words, self._array = [], ""
        else:
            self.end()

    def line_end(self, text: str, token: re.Match[str]) -> None:
        """The command is complete, but inside of an array."""
        if self._array:
            self.space(text, token)
        else:
            self.end()

    def end(self) -> None:
        """The command is complete."""
        if self._word is not None:
            self._words.append(self._word)
        if self._words:
            self.commands.append(self._words)
            for name, word in _assignments(self._words):
                self._assign(name, [word])
        self._words, self._word = [], None

    def _add(self, part: Word) -> None:
        before = self._word or Word("")
        self._word = Word(before.text + part.text, before.unknown + part.unknown)

    def _assign(self, name: str, values: list[Word]) -> None:
        is_other = name in self._assigned and self._variables[name] != values
        self._variables[name] = None if is_other else values
        self._assigned.add(name)

    def _value(self, text: str) -> Word:
        found = _NAMED.fullmatch(text)
        if found is None:
            return Word(text, (text,))
        values, rest = self._variables.get(found["name"]), found["rest"]
        default = _DEFAULT.fullmatch(rest)
        if values is not None and len(values) == 1 and (not rest or default is not None):
            return values[0]
        if default is not None and found["name"] not in self._variables:
            return Word(default["value"])
        return Word(text, (text,))


_KINDS = {
    "joined": _Reader.skip,
    "array": _Reader.array,
    "escaped": _Reader.escaped,
    "single": _Reader.single,
    "double": _Reader.double,
    "variable": _Reader.variable,
    "redirect": _Reader.redirect,
    "end": _Reader.line_end,
    "space": _Reader.space,
    "comment": _Reader.skip,
    "bracket": _Reader.bracket,
    "plain": _Reader.literal,
}


def _assignments(words: list[Word]) -> Iterator[tuple[str, Word]]:
    """The variables of a command that does nothing but assign."""
    kept = [word for word in words if word.text not in _BEFORE_ASSIGNMENTS]
    found = [_ASSIGNED.fullmatch(word.text) for word in kept]
    for word, assigned in zip(kept, found, strict=True):
        if assigned is not None and None not in found:
            yield assigned["name"], word._replace(text=assigned["value"])
