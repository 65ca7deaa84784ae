"""Rendered episodes as files: `<env>_seed<n>.gif`, and all frames side by side in `<env>_seed<n>.png`.

A frame is the result of `render`: an RGB array, or a text, which is drawn as in a terminal. Errors are
logged only: an episode goes on without its pictures.
"""

import asyncio
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.sdk.env import Env
from tailrace_protos.episode import EpisodeTask

log = get_logger(__name__)

_FRAME_MS = 500
_LAST_FRAME_MS = 1500
_MAX_FRAMES = 200
_STRIP_FRAMES = 16
_MAX_COLUMNS, _MAX_LINES = 96, 32  # of texts; all frames of an animation have one size
_MARGIN = 8
_TEXT_WIDTH, _TEXT_HEIGHT = 600, 400


class Pictures:
    """Draws the first `num_episodes` tasks of an evaluation into `folder`."""

    def __init__(self, folder: Path, num_episodes: int) -> None:
        self._folder = folder
        self._num_episodes = num_episodes

    def __call__(self, env: Env, task: EpisodeTask) -> "FrameRecorder | None":
        """See `MakeObserver`."""
        seed = task.task.seed
        is_drawn = task.phase == "eval" and task.member == 0 and not task.task.greedy
        if not is_drawn or seed >= self._num_episodes:
            return None
        return FrameRecorder(env, self._folder, f"{task.task.env_name}_seed{seed:03d}")


class FrameRecorder:
    """`EnvObserver` that keeps a frame of every state of an episode."""

    def __init__(self, env: Env, folder: Path, name: str) -> None:
        self._env = env
        self._folder = folder
        self._name = name
        self._is_broken = False
        self.frames: list[Image.Image] = []

    def on_reset(self, observation: str) -> None:
        """Starts with the frame of the first state."""
        self.frames.clear()
        self._take()

    def on_turn(self, reply: str, observation: str, reward: float, done: bool) -> None:
        """Adds the frame of the new state."""
        self._take()

    async def save(self) -> None:
        """See `EnvObserver`."""
        await asyncio.to_thread(save_frames, self.frames, self._folder, self._name)

    def _take(self) -> None:
        if self._is_broken or len(self.frames) >= _MAX_FRAMES:
            return
        try:
            with foreign_code("env.render"):
                frame = self._env.render()
                if frame is not None:
                    self.frames.append(_image(frame))
        except ForeignCodeError as error:
            self._is_broken = True
            log.warning("episode is not rendered", reason=str(error))


def _image(frame: Any) -> Image.Image:
    if isinstance(frame, str):
        return _drawn(frame)
    return Image.fromarray(np.asarray(frame, dtype=np.uint8))


def _drawn(text: str) -> Image.Image:
    """Draws a text on white and breaks long lines."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _MAX_COLUMNS) or [""]]
    canvas = Image.new("RGB", (_TEXT_WIDTH, _TEXT_HEIGHT), "white")
    shown = "\n".join(lines[:_MAX_LINES])
    ImageDraw.Draw(canvas).multiline_text((_MARGIN, _MARGIN), shown, "black", ImageFont.load_default())
    return canvas


def save_frames(frames: list[Image.Image], folder: Path, name: str) -> None:
    """Writes the animation and the strip; files appear complete or not at all."""
    if not frames:
        return
    durations = [_FRAME_MS] * (len(frames) - 1) + [_LAST_FRAME_MS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        gif = folder / f".{name}.gif.part"
        frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
        os.replace(gif, folder / f"{name}.gif")
        strip = folder / f".{name}.png.part"
        _strip(frames[:_STRIP_FRAMES]).save(strip, "PNG")
        os.replace(strip, folder / f"{name}.png")
    except OSError as error:
        log.warning("cannot save a rendered episode", folder=str(folder), name=name, reason=str(error))


def _strip(frames: list[Image.Image]) -> Image.Image:
    width, height = sum(frame.width for frame in frames), max(frame.height for frame in frames)
    strip = Image.new("RGB", (width, height), "white")
    left = 0
    for frame in frames:
        strip.paste(frame, (left, 0))
        left += frame.width
    return strip
