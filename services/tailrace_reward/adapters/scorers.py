"""Built-in scorers as one component: each row goes to the scorer that its data source names."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.scorers.answers import last_reply
from tailrace.scorers.code import ProgramTest, program_tests
from tailrace.scorers.registry import SCORERS, UnknownSourceError, scorer_for
from tailrace.tools.episode_tools import EpisodeTools
from tailrace_protos.chat import ToolCall
from tailrace_protos.reward import ScoreItem
from tailrace_protos.tool import ToolErrorKind, ToolResult
from tailrace_reward.config import RewardEntry
from tailrace_reward.ports import Component, ComponentFailedError

_TOOL = "python"
_MAX_TESTS = 20
_TEST_S = 10.0
_AT_ONCE = 8  # tests of one program
_NO_FILE = ""  # which no program can make: a large file would be no verdict
_NO_VERDICT = (ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.INVALID_ARGUMENTS, ToolErrorKind.TOO_LARGE)

MakeScorer = Callable[[float, Mapping[str, Any]], Component]  # of timeout_s and arguments


class SandboxTools(Protocol):
    """Source of tools: `ToolClient` in a run."""

    def session(self, episode_id: str, names: Sequence[str]) -> EpisodeTools:
        """Opens the tools of one episode."""


class RowScorer:
    """`Component` that picks a scorer for each row. Raises `ConfigError` for a missing package."""

    def __init__(
        self, entry: RewardEntry, make: MakeScorer, judge: Component | None, tools: SandboxTools | None
    ) -> None:
        check_packages(entry)
        self._entry = entry
        self._scorers: dict[str, Component] = {
            name: make(entry.timeout_s, {"scorer": name, "options": entry.options_of(name)})
            for name, spec in SCORERS.items()
            if spec.place == "process"
        }
        if tools is not None:
            self._scorers["code"] = SandboxTests(tools, **entry.options_of("code"))
        if judge is not None:
            self._scorers["judge"] = judge

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        source = str(item.task.row.get("data_source") or "")
        try:
            name = self._entry.scorer or scorer_for(source, self._entry.sources)
        except UnknownSourceError as error:
            raise ComponentFailedError(f"reward {self._entry.name!r}:", str(error)) from error
        if name not in self._scorers:
            needs = "a `judge`" if name == "judge" else "a run with sandboxes (cluster.num_sandboxes)"
            raise ComponentFailedError(f"scorer {name!r}", f"needs {needs}")
        return await self._scorers[name].score(item)


def check_packages(entry: RewardEntry) -> None:
    """Raises `ConfigError` if a scorer that the component names needs a package that is missing."""
    is_named = "math" in (entry.scorer, *entry.sources.values())
    if is_named and find_spec("math_verify") is None:
        raise ConfigError(
            f"reward {entry.name!r}: scorer math needs math-verify: pip install 'tailrace[math]'"
        )


class SandboxTests:
    """`Component` of programs: 1 if the reply's program passes all tests of the row, otherwise 0.

    With `partial` the share of passed tests counts.
    """

    def __init__(
        self,
        tools: SandboxTools,
        partial: bool = False,
        max_tests: int = _MAX_TESTS,
        timeout_s: float = _TEST_S,
    ) -> None:
        self._tools = tools
        self._partial = partial
        self._max_tests = max_tests
        self._timeout_s = timeout_s

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        try:
            with foreign_code("reading the row's tests"):
                tests = program_tests(last_reply(item.messages), item.task.row, self._max_tests)
        except ForeignCodeError as error:
            raise ComponentFailedError("scorer 'code':", str(error.error)) from error
        num_passed = 0
        async with self._tools.session(item.episode_id, (_TOOL,)) as session:
            for first in range(0, len(tests), _AT_ONCE):
                batch = tests[first : first + _AT_ONCE]
                passed = await asyncio.gather(*(self._passes(session, test) for test in batch))
                num_passed += sum(passed)
                if not self._partial and not all(passed):
                    return 0.0
        return num_passed / len(tests) if tests else 0.0

    async def _passes(self, session: EpisodeTools, test: ProgramTest) -> bool:
        arguments = {
            "code": test.code,
            "stdin": test.stdin,
            "timeout_s": self._timeout_s,
            "outputs": [_NO_FILE],  # so that the result is an object
        }
        result = await session.call(ToolCall("test", _TOOL, json.dumps(arguments)))
        found = _ended(result)
        if found is None or found["reason"] or found["exit_code"]:
            return False
        if found["output_was_cut"] and len(found["stdout"]) < test.least_output:
            raise ComponentFailedError(
                "scorer 'code':",
                f"a test expects {test.least_output} characters, and the sandbox keeps "
                f"{len(found['stdout'])} of them: raise sandbox.limits.max_output_bytes",
            )
        return test.passes(found["stdout"])


def _ended(result: ToolResult) -> dict[str, Any] | None:
    """End of a program as the sandbox tells it; None if the sandbox had to end it."""
    failed = result.infra_error or (result.content if result.error_kind in _NO_VERDICT else "")
    if failed:
        raise ComponentFailedError("scorer 'code':", failed)
    if result.error_kind not in (ToolErrorKind.NONE, ToolErrorKind.REPORTED):
        return None
    ended: dict[str, Any] = json.loads(result.content)
    return ended
