"""Attempts to get out. Each is a program that prints ESCAPED if, and only if, it got what it wanted.

`$SECRET`, `$FOLDER`, `$VICTIM`, `$SERVICE` and `$FD` are filled in by the tests. `works`: without a
sandbox it succeeds on any Linux machine as any user, also under Docker's default profile, which a test
proves; the others need rights or features that the machine may not have.
"""

# ruff: noqa: E501 - one attempt, one line

from __future__ import annotations

from typing import NamedTuple

_CALLS = """
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
arm = platform.machine() == "aarch64"
def call(x86, arm64, *args):
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return libc.syscall(ctypes.c_long(arm64 if arm else x86), *args)
def escaped(result):
    if result >= 0: print("ESCAPED")
"""


class Attempt(NamedTuple):
    """One way out."""

    name: str
    code: str
    works: bool = True


def calling(code: str) -> str:
    return _CALLS + code


FILES = (
    Attempt("reads a file outside", "print('ESCAPED', open('$SECRET').read())"),
    Attempt("writes a file outside", "open('$SECRET', 'a').write(''); print('ESCAPED')"),
    Attempt("makes a file outside", "open('$FOLDER/new', 'w').write('x'); print('ESCAPED')"),
    Attempt("makes a folder outside", "import os; os.mkdir('$FOLDER/d'); print('ESCAPED')"),
    Attempt("lists a folder outside", "import os; os.listdir('$FOLDER'); print('ESCAPED')"),
    Attempt("reads the list of users", "open('/etc/passwd').read(); print('ESCAPED')"),
    Attempt("reads through a symbolic link", "import os; os.symlink('$SECRET', 'l'); open('l').read(); print('ESCAPED')"),
    Attempt("reads through a link to a folder", "import os; os.symlink('$FOLDER', 'l'); open('l/secret').read(); print('ESCAPED')"),
    Attempt("climbs out of the working folder", "import os; os.listdir('..'); print('ESCAPED')"),
    Attempt("changes folder and reads there", "import os; os.chdir('$FOLDER'); open('secret').read(); print('ESCAPED')"),
    Attempt("hard-links a file outside", "import os; os.link('$SECRET', 'l'); open('l').read(); print('ESCAPED')"),
    Attempt("renames a file out", "import os; open('f', 'w').close(); os.rename('f', '$FOLDER/f'); print('ESCAPED')"),
    Attempt("truncates a file outside", "import os; os.truncate('$SECRET', 20); print('ESCAPED')"),
    Attempt("changes the mode of a file outside", "import os; os.chmod('$FOLDER/mode', 0o640); print('ESCAPED' * ((os.stat('$FOLDER/mode').st_mode & 0o777) == 0o640))"),
    Attempt("changes the time of a file outside", "import os; os.utime('$FOLDER/mode', (7, 7)); print('ESCAPED' * (os.stat('$FOLDER/mode').st_mtime == 7))"),
    Attempt("reads through a descriptor of a path", "import os; fd = os.open('$SECRET', os.O_PATH); os.open(f'/proc/self/fd/{fd}', os.O_RDONLY); print('ESCAPED')"),
    Attempt("reads from another process's shell", "import subprocess; print('ESCAPED' * (b'tailrace-secret' in subprocess.run(['cat', '$SECRET'], capture_output=True).stdout))"),
    Attempt("leaves something in /tmp", "import tempfile; tempfile.NamedTemporaryFile(dir='/tmp'); print('ESCAPED')"),
    Attempt("leaves something in /dev/shm", "open('/dev/shm/residue', 'w').close(); print('ESCAPED')", False),
    Attempt("makes shared memory with a name", "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64); m.unlink(); print('ESCAPED')", False),
    Attempt("watches a folder outside", calling("fd = call(294, 26, 0)\nif fd >= 0: escaped(libc.inotify_add_watch(int(fd), b'$FOLDER', 2))")),
    Attempt("opens a file by handle", calling("escaped(call(303, 264, -100, b'$SECRET', ctypes.create_string_buffer(b'\\x80\\0\\0\\0' + bytes(200)), ctypes.create_string_buffer(8), 0))"), False),
    Attempt("sets an attribute on a file outside", "import os; os.setxattr('$SECRET', 'user.x', b'1'); print('ESCAPED')", False),
)  # fmt: skip

PROCESSES = (
    Attempt("reads its own process's entry", "open('/proc/self/status').read(); print('ESCAPED')"),
    Attempt("reads the environment of the service", "open('/proc/$SERVICE/environ').read(); print('ESCAPED')"),
    Attempt("reads the environment of its parent", "import os; open(f'/proc/{os.getppid()}/environ').read(); print('ESCAPED')"),
    Attempt("lists processes", "import os; os.listdir('/proc'); print('ESCAPED')"),
    Attempt("writes into the memory of its parent", "import os; open(f'/proc/{os.getppid()}/mem', 'r+b'); print('ESCAPED')", False),
    Attempt("finds credentials in its environment", "import os; print('ESCAPED' * any('secret' in v for v in os.environ.values()))"),
    Attempt("finds credentials in its memory", "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\nprint('ESCAPED' * (libc.getenv(b'TAILRACE_NATS_PASSWORD') is not None))"),
    Attempt("reads an inherited descriptor", "import os; os.fstat($FD); print('ESCAPED')"),
    Attempt("finds any descriptor open", "import os\nfor fd in range(3, 1024):\n    try: os.fstat(fd)\n    except OSError: continue\n    print('ESCAPED', fd)", False),
    Attempt("traces a neighbour", calling("escaped(call(101, 117, 0x4206, $VICTIM, 0, 0))"), False),
    Attempt("lets itself be traced", calling("escaped(call(101, 117, 0, 0, 0, 0))")),
    Attempt("reads memory of a neighbour", calling("b = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\nescaped(-1 if call(310, 270, $VICTIM, v, 1, v, 1, 0) < 0 and ctypes.get_errno() == 1 else 0)"), False),
    Attempt("takes a descriptor of a neighbour", calling("fd = call(434, 434, $VICTIM, 0)\nescaped(fd)")),
    Attempt("signals a neighbour", "import os; os.kill($VICTIM, 0); print('ESCAPED')"),
    Attempt("signals the service", "import os; os.kill($SERVICE, 0); print('ESCAPED')"),
    Attempt("signals its parent", "import os; os.kill(os.getppid(), 0); print('ESCAPED')"),
    Attempt("signals everybody", "import os; os.kill(-1, 0); print('ESCAPED')"),
    Attempt("signals a thread of its parent", calling("escaped(call(200, 130, os.getppid(), 0))")),
    Attempt("queues a signal for its parent", calling("escaped(call(129, 138, os.getppid(), 0, ctypes.create_string_buffer(128)))"), False),
    Attempt("has the kernel signal its parent", "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()); print('ESCAPED')"),
    Attempt("limits its parent", "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CORE, r.getrlimit(r.RLIMIT_CORE)); print('ESCAPED')"),
    Attempt("slows its parent down", "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid())); print('ESCAPED')"),
    Attempt("pins its parent to a core", "import os; p = os.getppid(); os.sched_setaffinity(p, os.sched_getaffinity(p)); print('ESCAPED')"),
    Attempt("leaves its process group", "import os\nif os.fork() == 0:\n    os.setsid()\n    print('ESCAPED' * (os.getpgid(0) == os.getpid()), flush=True)\n    os._exit(0)\nos.wait()"),
    Attempt("raises a limit", "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (r.getrlimit(r.RLIMIT_NPROC)[1],) * 2 if r.getrlimit(r.RLIMIT_NPROC)[1] == -1 else (r.getrlimit(r.RLIMIT_NPROC)[1] + 1,) * 2); print('ESCAPED')", False),
)  # fmt: skip

KERNEL = (
    *(
        Attempt(f"opens a socket of family {name}", f"import socket; socket.socket({family}, socket.{kind}); print('ESCAPED')", works)
        for name, family, kind, works in (
            ("unix", 1, "SOCK_STREAM", True), ("unix datagram", 1, "SOCK_DGRAM", True),
            ("inet", 2, "SOCK_STREAM", True), ("inet datagram", 2, "SOCK_DGRAM", True),
            ("inet6", 10, "SOCK_STREAM", False), ("netlink", 16, "SOCK_RAW", True),
            ("packet", 17, "SOCK_RAW", False), ("alg", 38, "SOCK_SEQPACKET", False),
            ("vsock", 40, "SOCK_STREAM", False), ("bluetooth", 31, "SOCK_RAW", False),
        )
    ),
    Attempt("pairs datagram sockets", "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('ESCAPED')"),
    Attempt("connects a pair anew", calling("import socket\na, b = socket.socketpair()\nlibc.connect(a.fileno(), b'\\x01\\0\\0x', 4)\nprint('ESCAPED' * (ctypes.get_errno() != 1))")),
    Attempt("passes descriptors", "import array, socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0]); print('ESCAPED')"),
    Attempt("makes a user namespace", calling("escaped(libc.unshare(0x10000000))"), False),
    Attempt("makes a mount namespace", calling("escaped(libc.unshare(0x20000))"), False),
    Attempt("clones into a namespace", calling("r = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\nif r == 0: os._exit(0)\nescaped(r)"), False),
    Attempt("joins a namespace", calling("escaped(-1 if libc.setns(-1, 0) < 0 and ctypes.get_errno() == 1 else 0)"), False),
    Attempt("mounts", calling("escaped(libc.mount(b'none', b'.', b'tmpfs', 0, None))"), False),
    Attempt("changes the root", calling("escaped(libc.chroot(b'.'))"), False),
    Attempt("sets up io_uring", calling("escaped(call(425, 425, 4, ctypes.create_string_buffer(120)))"), False),
    Attempt("loads a BPF program", calling("escaped(call(321, 280, 0, ctypes.create_string_buffer(72), 72))"), False),
    Attempt("opens performance counters", calling("escaped(call(298, 241, ctypes.create_string_buffer(b'\\1\\0\\0\\0\\x70\\0\\0\\0' + bytes(104)), 0, -1, -1, 0))"), False),
    Attempt("uses the keyring", calling("escaped(call(248, 217, b'user', b'residue', b'x', 1, -3))"), False),
    Attempt("handles page faults", calling("escaped(call(323, 282, 1))"), False),
    Attempt("makes System V shared memory", calling("i = libc.shmget(0, 4096, 0o1600)\nif i >= 0: libc.shmctl(i, 0, None)\nescaped(i)")),
    Attempt("makes a System V queue", calling("i = libc.msgget(0, 0o1600)\nif i >= 0: libc.msgctl(i, 0, None)\nescaped(i)")),
    Attempt("makes a POSIX queue", calling("escaped(call(240, 180, b'residue', 0o102, 0o600, 0))"), False),
    Attempt("makes a file in memory", "import os; os.memfd_create('x'); print('ESCAPED')"),
    Attempt("makes anonymous shared memory", "import mmap; mmap.mmap(-1, 4096); print('ESCAPED')"),
    Attempt("changes its personality", calling("escaped(libc.personality(0x0040000))"), False),
    Attempt("adopts orphans", calling("escaped(libc.prctl(36, 1, 0, 0, 0))")),
    Attempt("installs a filter of its own", calling("escaped(call(317, 277, 0, 0, 0)) if ctypes.get_errno() else escaped(call(317, 277, 2, 0, (ctypes.c_uint * 1)(0x7fff0000)))")),
    Attempt("types into a terminal", calling("import pty\npty.openpty(); print('ESCAPED')"), False),
    Attempt("calls the 32-bit kernel", calling("escaped(call(0x40000000 + 39, 0x40000000 + 172))"), False),
    Attempt("becomes root", "import os; os.setuid(0); print('ESCAPED')", False),
)  # fmt: skip

ALL = FILES + PROCESSES + KERNEL
