"""The three tools as an episode calls them, over real confined processes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from tailrace_sandbox.adapters.backends import open_sandbox
from tests.integration.sandbox.box import CONFIG
from tests.integration.sandbox.contract import Call, ToolsContract, calling


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    sandbox = await open_sandbox(CONFIG, "test")
    async with calling(sandbox, CONFIG) as made:
        yield made
    await sandbox.close()


class TestProcesses(ToolsContract):
    """`backend: process`."""


async def test_shell_and_python_have_the_same_interpreter(call: Call) -> None:
    shell = await call("shell", command="python3 -c 'import sys; print(sys.prefix, sys.version)'")
    python = await call("python", code="import sys; print(sys.prefix, sys.version)")
    assert shell.content == python.content


@pytest.mark.skipif(shutil.which("fc-list") is None, reason="no fontconfig on this machine")
async def test_fonts_are_found_without_a_warning(call: Call) -> None:
    assert "Fontconfig" not in (await call("shell", command="fc-list")).content
