"""The system call filter, run by an interpreter of its own: what the kernel would decide."""

from __future__ import annotations

import struct

import pytest

from tailrace_sandbox.core.bpf import ALLOW, KILL, Compare, Rule, assemble, refuse
from tailrace_sandbox.core.policy import Confinement, filter_program
from tailrace_sandbox.core.syscalls import AUDIT_ARCH, numbers

MACHINES = sorted(AUDIT_ARCH)
EPERM = refuse(1)


def verdict(program: bytes, arch: int, number: int, *args: int) -> int:
    """Run a classic BPF program over one system call."""
    words = [value & (1 << 64) - 1 for value in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("=IIQ6Q", number, arch, 0, *words)
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = place = 0
    while True:
        operation, if_true, if_false, value = code[place]
        place += 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x05:
                place += value
            case 0x15:
                place += if_true if accumulator == value else if_false
            case 0x35:
                place += if_true if accumulator >= value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"operation {operation:#x}")


def decide(
    machine: str, name: str, *args: int, own_user: bool = False, abi: int = 7, pid: int = 0
) -> int:
    program = filter_program(Confinement(machine, own_user, abi, pid))
    return verdict(program, AUDIT_ARCH[machine], numbers(machine)[name], *args)


def test_every_number_gets_the_verdict_that_it_was_given() -> None:
    given = {3: ALLOW, 4: ALLOW, 7: EPERM, 200: Rule(((Compare(1, 5),),), EPERM), 201: ALLOW}
    program = assemble(1, given, refuse(38))
    for number in range(260):
        wanted = given.get(number, refuse(38))
        assert verdict(program, 1, number, 0, 5) == (ALLOW if isinstance(wanted, Rule) else wanted)
    assert verdict(program, 1, 200, 0, 6) == EPERM


def test_another_architecture_and_the_32_bit_variant_are_killed() -> None:
    program = assemble(1, {3: ALLOW}, EPERM)
    assert verdict(program, 2, 3) == KILL
    assert verdict(program, 1, 0x40000003) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_are_allowed_and_dangerous_ones_are_not(machine: str) -> None:
    for name in ("read", "openat", "futex", "execve", "mkdirat", "getrandom", "wait4"):
        assert decide(machine, name) == ALLOW, name
    for name in (
        "connect",
        "setsockopt",
        "ptrace",
        "unshare",
        "io_uring_setup",
        "bpf",
        "keyctl",
        "mount",
        "setns",
    ):
        assert decide(machine, name) == EPERM, name


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_makes_threads_and_processes_but_no_namespaces(machine: str) -> None:
    assert decide(machine, "clone", 0x3D0F00) == ALLOW
    assert decide(machine, "clone", 17) == ALLOW
    assert decide(machine, "clone", 0x4111) == ALLOW  # vfork
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, "clone", flag | 17) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_that_a_call_arms_continues_a_stopped_process(machine: str) -> None:
    assert decide(machine, "timer_create") == refuse(38)
    assert decide(machine, "kill", 1234, 18) == EPERM
    assert decide(machine, "tgkill", 1234, 1234, 18) == EPERM
    assert decide(machine, "clone", 18) == EPERM  # what tells the parent of the end
    assert decide(machine, "clone", 0x3D0F00 | 18) == EPERM
    for command in (8, 10, 15):
        assert decide(machine, "fcntl", 3, command) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_have_no_files_of_their_own(machine: str) -> None:
    assert decide(machine, "clone", 0x3D0F00 & ~0x400) == EPERM
    assert decide(machine, "close_range", 3, 9, 2) == EPERM
    assert decide(machine, "close_range", 3, 9, 4) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_what_no_limit_counts_is_refused_in_a_way_that_programs_understand(machine: str) -> None:
    assert decide(machine, "socket") == refuse(101)  # network is unreachable
    for name in ("sendfile", "splice"):
        assert decide(machine, name) == refuse(22)
    assert decide(machine, "fallocate", 3, 1, 0, 1 << 40) == refuse(95)  # libraries write instead
    for command in (6, 7, 37, 38):
        assert decide(machine, "fcntl", 3, command) == refuse(0)
    for command in (0, 1, 2, 3, 4, 5, 1030):
        assert decide(machine, "fcntl", 3, command) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_go_to_one_process_at_a_time(machine: str) -> None:
    assert decide(machine, "kill", 1234, 9) == ALLOW
    for group in (0, -1, -1234):
        assert decide(machine, "kill", group, 9) == EPERM


def test_without_scoped_signals_only_the_first_process_may_be_signalled() -> None:
    assert decide("x86_64", "kill", 77, 9, abi=5, pid=77) == ALLOW
    assert decide("x86_64", "kill", 78, 9, abi=5, pid=77) == EPERM
    assert decide("x86_64", "tgkill", 78, 78, abi=5, pid=77) == EPERM


def test_modes_change_for_a_user_of_its_own_and_seem_to_for_others() -> None:
    assert decide("x86_64", "chmod", own_user=True) == ALLOW
    assert decide("x86_64", "chmod", own_user=False) == refuse(0)


def test_truncation_by_path_is_refused_where_landlock_does_not_watch_it() -> None:
    assert decide("x86_64", "truncate", abi=3) == ALLOW
    assert decide("x86_64", "truncate", abi=2) == EPERM


def test_only_a_connected_stream_pair_is_a_socket() -> None:
    cloexec_nonblock = 0x80800
    assert decide("x86_64", "socketpair", 1, 1 | cloexec_nonblock) == ALLOW
    assert decide("x86_64", "socketpair", 1, 2) == EPERM
    assert decide("x86_64", "socketpair", 2, 1) == EPERM


def test_memory_is_shared_through_files_alone() -> None:
    assert decide("x86_64", "mmap", 0, 4096, 3, 0x22) == ALLOW
    assert decide("x86_64", "mmap", 0, 4096, 3, 0x01) == ALLOW
    assert decide("x86_64", "mmap", 0, 4096, 3, 0x21) == EPERM


def test_no_memory_comes_from_the_pool_of_huge_pages() -> None:
    for flags in (0x40022, 0x40021, 0x40002, 0x40001, 21 << 26 | 0x40022):
        assert decide("x86_64", "mmap", 0, 1 << 21, 3, flags) == EPERM


def test_an_unknown_call_of_a_future_kernel_does_not_exist() -> None:
    program = filter_program(Confinement("x86_64", False, 7))
    assert verdict(program, AUDIT_ARCH["x86_64"], 999) == refuse(38)
