"""Choice of a backend, and backends of users."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import ConfigError
from tailrace_sandbox.adapters.backends import open_sandbox
from tailrace_sandbox.adapters.box import BoxAnswer, BoxCommand
from tailrace_sandbox.adapters.box_files import collected
from tailrace_sandbox.adapters.boxes import BoxSandbox
from tailrace_sandbox.adapters.docker import DockerBoxes, has_ended, own_process, run_command
from tailrace_sandbox.adapters.docker_program import Docker
from tailrace_sandbox.adapters.tools import KeptShellTool, PythonTool, ShellTool
from tailrace_sandbox.config import AgentSandboxConfig, CallLimits, DockerConfig, SandboxConfig
from tailrace_sandbox.ports import Execution, SandboxLostError, SandboxSession, Work


class EchoSandbox:
    """A user's backend: it returns the code that it is given."""

    def __init__(self, config: SandboxConfig, mark: str) -> None:
        self._wall_s = config.limits.wall_s
        self._mark = mark
        self.started = False

    async def start(self) -> None:
        self.started = True

    async def run(self, work: Work) -> Execution:
        if work.code == "full":
            return Execution(1, reason="the {queue} is full")
        return Execution(0, f"{self._mark}{work.code} {self._wall_s:g}")

    async def open_session(self, mode: str = "session", image: str = "") -> SandboxSession:
        raise NotImplementedError

    async def close(self) -> None:
        self.started = False


OWN = f"{__name__}:EchoSandbox"


async def test_a_class_of_the_user_is_a_backend() -> None:
    limits = CallLimits(wall_s=7.0)
    config = SandboxConfig(backend=OWN, backend_args={"mark": "> "}, limits=limits)
    sandbox = await open_sandbox(config, "test")
    assert isinstance(sandbox, EchoSandbox)
    assert sandbox.started
    assert (await sandbox.run(Work("python", "code", 1.0))).stdout == "> code 7"


async def test_reasons_of_a_users_backend_are_told_in_its_words() -> None:
    config = SandboxConfig(backend=OWN, backend_args={"mark": ""})
    result = await PythonTool(EchoSandbox(config, ""), config).execute({"code": "full"})
    assert (result.content, result.is_error) == ("[ended because the {queue} is full]", True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"outputs": ["a\0*"]}, "outputs: a path holds a null"),
        ({"files": {"a\0b": "text"}}, "files: a path holds a null"),
    ],
)
async def test_paths_that_no_file_has_are_told(arguments: dict[str, Any], words: str) -> None:
    config = SandboxConfig(backend=OWN, backend_args={"mark": ""})
    with pytest.raises(ValueError, match=words):
        await PythonTool(EchoSandbox(config, ""), config).execute({"code": "1", **arguments})


async def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.backend.*NoSandbox"):
        await open_sandbox(SandboxConfig(backend=f"{__name__}:NoSandbox"), "test")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backend": "podman"}, "process, docker, agent_sandbox, or module:Class"),
        ({"backend_args": {"a": 1}}, "module:Class"),
        ({"keep_shell": True}, "docker or agent_sandbox"),
    ],
)
def test_mistakes_name_what_is_valid(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SandboxConfig(**section)


@pytest.mark.parametrize("user", ["root", "0", "0:0", ""])
def test_tool_code_is_never_root_in_a_container(user: str) -> None:
    with pytest.raises(ValueError, match="another user than root"):
        DockerConfig(user=user)


def test_images_of_unknown_tools_are_refused() -> None:
    with pytest.raises(ValueError, match="'bash' is none of the tools"):
        DockerConfig(images={"bash": "x"})
    with pytest.raises(ValueError, match="'bash' is none of the tools"):
        AgentSandboxConfig(warm_pools={"bash": "x"})


def test_every_limit_reaches_the_container() -> None:
    limits = CallLimits(
        memory_bytes=1001, max_processes=7, disk_bytes=1002, max_files=8, max_open_files=9, cpu_s=10
    )
    config = DockerConfig(cpus=0.5, runtime="runsc", user="7:8", pull="never")
    given = " ".join(run_command(config, limits, "an/image", "a-name", "owner"))
    for words in (
        "--network none", "--read-only", "--user 7:8", "--cap-drop ALL", "no-new-privileges",
        "--memory 1001", "--memory-swap 1001", "--pids-limit 9", "--cpus 0.5", "nofile=9", "cpu=10",
        "size=1002,nr_inodes=9", "--runtime runsc", "--pull never", "an/image",
    ):  # fmt: skip
        assert words in given


async def test_the_container_of_a_tool_has_the_limits_of_that_tool(tmp_path: Path) -> None:
    told = tmp_path / "told"
    docker = DockerConfig(image="i", program=fake_docker(tmp_path, f'echo "$@" >>{told}'))
    config = SandboxConfig(
        backend="docker",
        docker=docker,
        limits=CallLimits(memory_bytes=1001),
        tool_limits={"python_session": {"memory_bytes": 2002}},
    )
    boxes = DockerBoxes(config)
    for mode in ("session", "python"):
        await boxes.open(mode, "")
    session, python = told.read_text().splitlines()
    assert "--memory 2002" in session
    assert "--memory 1001" in python


def test_a_task_may_change_files_of_its_image_where_the_configuration_says_so() -> None:
    given = run_command(DockerConfig(read_only=False), CallLimits(), "i", "n", "o")
    assert "--read-only" not in given


def fake_docker(folder: Path, script: str) -> str:
    """A program that stands in for Docker's command line."""
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_commands_start_in_the_folder_of_the_task(tmp_path: Path) -> None:
    docker = DockerConfig(image="i", workdir="/testbed", program=fake_docker(tmp_path, 'echo "$@"'))
    box = await DockerBoxes(SandboxConfig(backend="docker", docker=docker)).open("shell", "")
    answer = await box.execute(BoxCommand(("ls", "-l"), 60.0))
    assert answer.stdout.startswith(b"exec --interactive --workdir /testbed tailrace-")
    assert answer.stdout.endswith(b" ls -l\n")


async def test_a_container_that_does_not_start_in_time_is_lost(tmp_path: Path) -> None:
    program = fake_docker(tmp_path, '[ "$1" = rm ] || exec sleep 30')
    docker = DockerConfig(image="i", pull_s=0.1, program=program)
    boxes = DockerBoxes(SandboxConfig(backend="docker", docker=docker))
    with pytest.raises(SandboxLostError, match=r"within 0\.1 s"):
        await boxes.open("shell", "")


WITHOUT_CGROUPS = """
case "$3" in
cat) exit 1 ;;
/bin/sh) exec /bin/sh -c "$(echo "$5" | sed 's#/sys/#/none/#g')" ;;
esac
[ "$1" != exec ] || exit 3
"""


async def test_a_command_fails_alone_where_the_runtime_shows_no_cgroups(tmp_path: Path) -> None:
    """As gVisor (`runsc`): the container lives, though nothing tells whether memory ran out."""
    docker = DockerConfig(image="i", program=fake_docker(tmp_path, WITHOUT_CGROUPS))
    box = await DockerBoxes(SandboxConfig(backend="docker", docker=docker)).open("shell", "")
    answer = await box.execute(BoxCommand(("false",), 60.0))
    assert (answer.exit_code, answer.reason) == (3, "")


async def test_a_container_that_is_gone_is_lost(tmp_path: Path) -> None:
    script = '[ "$1" != exec ] || { echo "Error: No such container" >&2; exit 1; }'
    docker = DockerConfig(image="i", program=fake_docker(tmp_path, script))
    box = await DockerBoxes(SandboxConfig(backend="docker", docker=docker)).open("shell", "")
    with pytest.raises(SandboxLostError, match="No such container"):
        await box.execute(BoxCommand(("false",), 60.0))


async def test_an_image_that_does_not_come_in_time_is_named_at_the_start(tmp_path: Path) -> None:
    program = fake_docker(tmp_path, 'case "$1" in image) exit 1 ;; pull) exec sleep 30 ;; esac')
    docker = DockerConfig(image="i", pull_s=0.1, program=program)
    with pytest.raises(ConfigError, match=r"sandbox\.backend is docker: docker pull did not end"):
        await DockerBoxes(SandboxConfig(backend="docker", docker=docker)).start()


def test_a_living_service_keeps_its_containers_and_a_dead_one_does_not() -> None:
    boot, space, pid, started = own_process().split("-")
    assert not has_ended(own_process())
    assert has_ended(f"{boot}-{space}-{pid}-{int(started) + 1}")
    assert has_ended(f"{boot}-{space}-4194304-1")
    assert not has_ended(f"other-{space}-4194304-1")
    assert not has_ended("nonsense")


class FakeBox:
    """A box with these files, whose content is their name."""

    def __init__(self, names: list[str], others: list[str]) -> None:
        self._listed = b"".join(f"./{name}\0".encode() for name in names)
        self._listed += b"/\0" + b"".join(f"./{name}\0".encode() for name in others)

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        if command.argv[0] == "head":
            return BoxAnswer(0, command.argv[-1][2:].encode()[: int(command.argv[2])])
        return BoxAnswer(0, self._listed)

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


NAMES = ["a", "b.txt", "d/c.txt", "d/e/f.txt", ".h", "d/.h.txt"]
PATTERNS = {
    "*": ["a", "b.txt"],
    "*.txt": ["b.txt"],
    "**/*.txt": ["b.txt", "d/c.txt", "d/e/f.txt"],
    "d/**/f.txt": ["d/e/f.txt"],
    "./d/c.txt": ["d/c.txt"],
    ".*": [".h"],
    "?": ["a"],
    "**": ["a", "b.txt", "d/c.txt", "d/e/f.txt"],
    "": [],
    "../a": [],
}


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_patterns_choose_files(pattern: str) -> None:
    found = await collected(FakeBox(NAMES, []), (pattern,), 1000)
    assert sorted(found.files) == PATTERNS[pattern]


async def test_files_that_are_too_many_too_large_or_no_files_are_refused() -> None:
    names = [f"n{number:03}" for number in range(70)]
    found = await collected(FakeBox([*names, "z" * 40], ["link"]), ("*",), 4 * 64)
    assert sorted(found.files) == names[:64]
    assert sorted(found.refused) == ["link", *names[64:], "z" * 40]


class OddBox(FakeBox):
    """A box with a file whose name is no UTF-8."""

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        return BoxAnswer(0, b"1" if command.argv[0] == "head" else b"./a\xff\0/\0./l\xff\0")


async def test_names_that_are_no_text_come_back_as_text() -> None:
    found = await collected(OddBox([], []), ("*",), 100)
    assert (found.files, found.refused) == ({"a\ufffd": b"1"}, ("l\ufffd",))


async def test_a_pattern_that_makes_matchers_slow_does_not() -> None:
    pattern = "/".join(["**"] * 200) + "/" + "*a" * 200 + "b"
    found = await collected(FakeBox(["/".join(["x"] * 500) + "/" + "a" * 500], []), (pattern,), 100)
    assert found.files == {}


class HereBox(FakeBox):
    """A box whose commands run in a folder of this machine, with the bounds of their output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def execute(self, command: BoxCommand) -> BoxAnswer:
        done = subprocess.run(command.argv, cwd=self._folder, capture_output=True, check=False)
        kept = done.stdout[: command.max_output_bytes]
        return BoxAnswer(done.returncode, kept, is_cut=len(done.stdout) > len(kept))


async def test_files_come_back_from_a_folder_with_more_files_than_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace_sandbox.adapters.box_files._MAX_LIST_BYTES", 100)
    (tmp_path / "repo").mkdir()
    for number in range(50):
        (tmp_path / "repo" / f"module_{number}.py").touch()
    (tmp_path / "zz.diff").write_text("one line")
    (tmp_path / "link").symlink_to("zz.diff")
    box = HereBox(tmp_path)
    found = await collected(box, ("*.diff", "link"), 1000)
    assert (found.files, found.refused) == ({"zz.diff": b"one line"}, ("link",))
    assert "**/*.py" in (await collected(box, ("**/*.py",), 1000)).refused


@pytest.mark.parametrize("kind", [ShellTool, KeptShellTool])
async def test_a_command_that_no_command_line_can_be_is_told(
    kind: type[ShellTool | KeptShellTool], tmp_path: Path
) -> None:
    docker = DockerConfig(image="i", program=fake_docker(tmp_path, 'echo "$@" | wc -c'))
    config = SandboxConfig(backend="docker", docker=docker)
    sandbox = BoxSandbox(DockerBoxes(config), config)
    tool = kind(sandbox, config)
    longest = "echo " + "é" * 65533
    assert len(longest.encode()) == 131_071
    assert not (await tool.execute({"command": longest})).is_error
    with pytest.raises(ValueError, match="longer than 131071 bytes"):
        await tool.execute({"command": longest + "x"})
    await tool.release()
    await sandbox.close()


async def test_a_machine_that_can_start_no_process_is_no_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*_argv: str, **_options: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(SandboxLostError, match=r"docker pause cannot be started.*temporarily"):
        await Docker("docker").order("pause", "it")
