"""Frames of Sokoban, drawn with numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailrace_envs.sokoban.board import Board, Position

TILE = 32  # pixels

_COLOURS = {
    "wall": (92, 84, 80),
    "joint": (70, 63, 60),
    "floor": (236, 226, 206),
    "goal": (206, 62, 54),
    "box": (176, 118, 58),
    "edge": (112, 72, 34),
    "done": (86, 150, 74),
    "player": (42, 92, 168),
}


def draw(board: Board, position: Position) -> NDArray[np.uint8]:
    """The board, [rows * TILE, columns * TILE, 3]."""
    letters = board.text(position).split()
    rows = [np.concatenate([_tile(letter) for letter in row], axis=1) for row in letters]
    return np.concatenate(rows, axis=0)


def _tile(letter: str) -> NDArray[np.uint8]:
    tile = np.full((TILE, TILE, 3), _COLOURS["wall" if letter == "#" else "floor"], np.uint8)
    if letter == "#":
        tile[:: TILE // 2], tile[:, :: TILE // 2] = _COLOURS["joint"], _COLOURS["joint"]
    if letter in "OS*":
        _fill(tile, TILE // 3, "goal")
    if letter in "X*":
        _fill(tile, TILE // 8, "edge")
        _fill(tile, TILE // 5, "done" if letter == "*" else "box")
    if letter in "PS":
        rows, columns = np.ogrid[:TILE, :TILE]
        centre = (TILE - 1) / 2
        disc = (rows - centre) ** 2 + (columns - centre) ** 2 <= (TILE * 0.32) ** 2
        tile[disc] = _COLOURS["player"]
    return tile


def _fill(tile: NDArray[np.uint8], margin: int, colour: str) -> None:
    tile[margin : TILE - margin, margin : TILE - margin] = _COLOURS[colour]
