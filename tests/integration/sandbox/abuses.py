"""Attacks on what calls share, in two kinds.

`GRABS` want a thing that no call may have; each prints ESCAPED if it got it. `HOGS` want more than their
share; a hog may end as it likes, as long as no limit is passed, nothing of it stays and the next call
runs.
"""

# ruff: noqa: E501 - one attack, one line

from __future__ import annotations

from tests.integration.sandbox.attempts import calling

_TIME = "ctypes.create_string_buffer(64)"

GRABS = {
    # Kernel objects that no limit counts.
    "io_uring enter": calling("escaped(call(426, 426, 0, 0, 0, 0, 0, 0))"),
    "io_uring register": calling("escaped(call(427, 427, -1, 0, 0, 0)) if ctypes.get_errno() != 1 else None"),
    "old aio": calling("escaped(call(206, 0, 64, ctypes.byref(ctypes.c_long())))"),
    "userfaultfd device": "import os; os.open('/dev/userfaultfd', os.O_RDWR); print('ESCAPED')",
    "secret memory": calling("escaped(call(447, 447, 0))"),
    "huge file in memory": calling("escaped(call(319, 279, b'x', 4))"),
    "a session keyring": calling("escaped(call(250, 219, 1, b'mine', 0, 0, 0))"),
    "a key by request": calling("escaped(call(249, 218, b'user', b'x', b'y', -3))"),
    "a POSIX queue by library": calling("rt = ctypes.CDLL('librt.so.1', use_errno=True)\nescaped(rt.mq_open(b'/residue', 0o102, 0o600, None))"),
    "POSIX shared memory": calling("rt = ctypes.CDLL('librt.so.1', use_errno=True)\nescaped(rt.shm_open(b'/residue', 0o102, 0o600))"),
    "a named semaphore": "import _multiprocessing as m; m.SemLock(1, 1, 9, '/residue', False); print('ESCAPED')",
    "System V semaphores": calling("i = libc.semget(0, 9, 0o1600)\nif i >= 0: libc.semctl(i, 0, 0)\nescaped(i)"),
    "System V memory by key": calling("i = libc.shmget(77, 4096, 0o1600)\nif i >= 0: libc.shmctl(i, 0, None)\nescaped(i)"),
    "watch of its own folder": calling("escaped(call(294, 26, 0))"),
    "fanotify": calling("escaped(call(300, 262, 0, 0))"),
    "pages in a pipe by splice": calling("import os\nr, w = os.pipe()\nf = open('f', 'w+b'); f.write(bytes(9)); f.seek(0)\nescaped(call(275, 76, f.fileno(), 0, w, 0, 9, 0))"),
    "pages in a pipe by vmsplice": calling("import os\nr, w = os.pipe()\nb = ctypes.create_string_buffer(9)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 9)\nescaped(call(278, 75, w, v, 1, 0))"),
    "pages by tee": calling("import os\na, b = os.pipe(); c, d = os.pipe(); os.write(b, b'x')\nescaped(call(276, 77, a, d, 1, 0))"),
    "a larger pipe": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20); print('ESCAPED')",
    "a descriptor in flight": "import socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [a.fileno()]); print('ESCAPED')",
    "a cycle of descriptors in flight": calling("import socket\na, b = socket.socketpair()\nm = ctypes.create_string_buffer(56)\nescaped(call(46, 211, a.fileno(), m, 0))"),
    "many messages at once": calling("import socket\na, b = socket.socketpair()\nm = ctypes.create_string_buffer(64)\nescaped(call(307, 269, a.fileno(), m, 1, 0))"),
    "a larger send buffer": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 7, 1 << 26); print('ESCAPED')",
    "a larger receive buffer": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 8, 1 << 26); print('ESCAPED')",
    "a sequence of packets": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); print('ESCAPED')",
    # Time, priority and signals.
    "a timer with any signal": calling("e = (ctypes.c_int * 16)(0, 0, 18, 0)\nescaped(call(222, 107, 1, e, ctypes.byref(ctypes.c_int())))"),
    "a timer of the boot clock": calling("e = (ctypes.c_int * 16)(0, 0, 18, 0)\nescaped(call(222, 107, 9, e, ctypes.byref(ctypes.c_int())))"),
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 1); print('ESCAPED')",
    "the clock, slowly": calling("escaped(call(159, 171, ctypes.create_string_buffer(b'\\1\\0\\0\\0' + bytes(300)))) "),
    "the clock of another": calling("escaped(call(305, 266, 0, ctypes.create_string_buffer(b'\\1\\0\\0\\0' + bytes(300))))"),
    "real-time priority": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print('ESCAPED')",
    "batch priority": "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); print('ESCAPED')",
    "a deadline scheduler": calling("escaped(call(314, 274, 0, ctypes.create_string_buffer(b'\\x30' + bytes(47)), 0))"),
    "less niceness": "import os; n = os.getpriority(0, 0); os.nice(-1); print('ESCAPED' * (os.getpriority(0, 0) < n))",
    "niceness of its user": "import os; os.setpriority(os.PRIO_USER, 0, 19); print('ESCAPED')",
    "priority of its disk": calling("escaped(call(251, 30, 1, 0, 4 << 13))"),
    "SIGCONT for its group": "import os; os.killpg(0, 18); print('ESCAPED')",
    "SIGCONT for itself": "import os; os.kill(os.getpid(), 18); print('ESCAPED')",
    "SIGCONT by a queue": calling("escaped(call(129, 138, os.getpid(), 18, ctypes.create_string_buffer(128)))"),
    "SIGCONT by a descriptor": calling("f = call(434, 434, os.getpid(), 0)\nescaped(f)"),
    "SIGCONT at a child's end": calling("r = call(56, 220, 18, 0, 0, 0, 0)\nif r == 0: os._exit(0)\nescaped(r)"),
    "SIGCONT of its output": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 18); print('ESCAPED')",
    "death of its zygote by its own": calling("libc.prctl(1, 0, 0, 0, 0) == 0 and print('ESCAPED')"),
    # Other processes.
    "a trace of its child": calling("p = os.fork()\nif p == 0:\n    import time; time.sleep(9)\nr = call(101, 117, 0x4206, p, 0, 0)\nos.kill(p, 9)\nescaped(r)"),
    "memory of its child": calling("p = os.fork()\nif p == 0:\n    import time; time.sleep(9)\nb = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\nr = call(311, 271, p, v, 1, v, 1, 0)\nos.kill(p, 9)\nescaped(r)"),
    "what its zygote holds": "import os\nways = {'mem': open, 'maps': open, 'environ': open, 'fd': os.listdir, 'task': os.listdir, 'fd/3': os.stat, 'root/.': os.stat, 'cwd/.': os.stat, 'exe': os.stat, 'ns/user': os.stat}\nfor name, way in ways.items():\n    try: way(f'/proc/{os.getppid()}/{name}')\n    except OSError: continue\n    print('ESCAPED', name)",
    "comparison of kernel objects": calling("escaped(call(312, 272, os.getpid(), os.getppid(), 0, 0, 0))"),
    "a handle of its zygote": calling("escaped(call(434, 434, os.getppid(), 0))"),
    "advice on a neighbour's memory": calling("escaped(call(440, 440, 0, 0, 0, 0, 0))"),
    "robust list of its parent": calling("escaped(call(274, 100, os.getppid(), ctypes.byref(ctypes.c_long()), ctypes.byref(ctypes.c_long())))"),
    "limits of its own, raised": "import resource as r\nfor k in range(16):\n    soft, hard = r.getrlimit(k)\n    if hard != -1:\n        try: r.setrlimit(k, (hard + 1, hard + 1))\n        except (OSError, ValueError): continue\n        print('ESCAPED', k)",
    "locked memory": calling("b = ctypes.create_string_buffer(1 << 22)\nescaped(libc.mlock(b, 1 << 22))"),
    "all memory locked": calling("escaped(libc.mlockall(3))"),
    "segments of the processor": calling("escaped(call(154, 999, 1, ctypes.create_string_buffer(16), 16))"),
    # Names and links.
    "a race of links": "import os, threading\nopen('f', 'w').close()\ndef swap():\n    for _ in range(2000):\n        try: os.symlink('$SECRET', 'l'); os.unlink('l'); os.link('f', 'l'); os.unlink('l')\n        except OSError: pass\nt = threading.Thread(target=swap); t.start()\nwhile t.is_alive():\n    try:\n        if 'tailrace' in open('l').read(): print('ESCAPED')\n    except OSError: pass",
    "a link in proc": "import os\nfor fd in os.listdir('/proc/self/fd') if os.access('/proc/self/fd', 4) else []: print('ESCAPED', fd)",
    "an archive that climbs": "import io, tarfile\nb = io.BytesIO(); t = tarfile.open(fileobj=b, mode='w'); i = tarfile.TarInfo('$FOLDER/new'); i.size = 1; t.addfile(i, io.BytesIO(b'x')); t.close(); b.seek(0)\ntarfile.open(fileobj=b).extractall('/'); print('ESCAPED')",
    "an archive with a link": "import io, tarfile, os\nb = io.BytesIO(); t = tarfile.open(fileobj=b, mode='w'); i = tarfile.TarInfo('l'); i.type = tarfile.SYMTYPE; i.linkname = '$FOLDER'; t.addfile(i); j = tarfile.TarInfo('l/new'); j.size = 1; t.addfile(j, io.BytesIO(b'x')); t.close(); b.seek(0)\ntarfile.open(fileobj=b).extractall('.'); print('ESCAPED')",
    "a bound socket in its folder": calling("import socket\na, b = socket.socketpair()\nescaped(libc.bind(a.fileno(), b'\\1\\0x', 3))"),
    "a device": "import os, stat; os.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 1)); print('ESCAPED')",
    "a bind mount of its folder": calling("escaped(libc.mount(b'.', b'.', None, 4096, None))"),
    "a program with more rights": "import os, shutil; shutil.copy('/bin/sh', 's'); os.chmod('s', 0o6755); print('ESCAPED' * ((os.stat('s').st_mode & 0o6000) != 0 and os.system('./s -p -c \"cat $SECRET\"') == 0))",
}  # fmt: skip

_FORKS = "import os, socket, time\nfor _ in range(9):\n    if os.fork() == 0: break\n"

HOGS = {
    "descriptors of events": "import select, time\nkept = []\ntry:\n    while True: kept.append(select.epoll())\nexcept OSError: pass\ntime.sleep(0.3)",
    "a chain of epolls": "import select\nkept = [select.epoll() for _ in range(30)]\nfor a, b in zip(kept, kept[1:]):\n    try: a.register(b.fileno())\n    except OSError: pass\nfor e in kept:\n    for f in kept:\n        try: e.register(f.fileno())\n        except (OSError, ValueError): pass",
    "timers": calling("kept = [call(283, 85, 1, 0) for _ in range(99)]\nspec = (ctypes.c_long * 4)(0, 1000, 0, 1000)\nfor fd in kept: call(286, 86, fd, 0, spec, None)\nimport time; time.sleep(0.3)"),
    "a storm of signals": "import os, signal, time\nsignal.signal(10, lambda *_: None)\nend = time.time() + 0.5\nif os.fork() == 0:\n    while time.time() < end: os.kill(os.getppid(), 10)\n    os._exit(0)\nwhile time.time() < end: pass",
    "a storm of alarms": "import signal, time\nsignal.signal(14, lambda *_: None)\nsignal.setitimer(0, 1e-6, 1e-6)\nend = time.time() + 0.4\nwhile time.time() < end: pass",
    "forks that leave their session": "import os\nwhile True:\n    if os.fork() == 0:\n        try: os.setsid()\n        except OSError: pass",
    "forks without an end": "import os\nwhile True:\n    try: pid = os.fork()\n    except OSError: continue\n    if pid: os._exit(0)",
    "zombies": "import os, time\nfor _ in range(500):\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: pass\ntime.sleep(0.3)",
    "orphans": "import os, time\nfor _ in range(300):\n    try:\n        if os.fork() == 0:\n            if os.fork() == 0: time.sleep(0.01)\n            os._exit(0)\n    except OSError: pass",
    "threads that end and begin": "import threading, time\nend = time.time() + 0.5\nwhile time.time() < end:\n    try: threading.Thread(target=int).start()\n    except RuntimeError: pass",
    "sockets full of bytes": _FORKS + "kept = []\ntry:\n    while True: kept.append(socket.socketpair())\nexcept OSError: pass\nfor p in kept:\n    for s in p:\n        s.setblocking(False)\n        try:\n            while True: s.send(bytes(1 << 16))\n        except OSError: pass\ntime.sleep(9)",
    "pages by the brk": "import ctypes, time\nlibc = ctypes.CDLL(None); libc.sbrk.restype = ctypes.c_void_p\np = libc.sbrk(200 << 20)\ntime.sleep(0.2)",
    "stacks of threads": "import threading, time\nthreading.stack_size(64 << 20)\ndef deep(n=0):\n    x = bytes(4096)\n    return deep(n + 1) if n < 900 else time.sleep(9)\nfor _ in range(9): threading.Thread(target=deep).start()",
    "a JSON bomb": "import json; json.loads('[' * 200_000)",
    "a deep pickle": "import pickle; pickle.loads(b'(' * 50_000_000 + b'.')",
    "an integer bomb": "x = 10 ** 10 ** 9",
    "a string bomb": "x = 'a' * (1 << 40)",
    "a regular expression bomb": "import re; re.match('(a+)+b', 'a' * 60)",
    "an archive bomb": "import zlib\nc = zlib.compressobj(); z = b''.join(c.compress(bytes(1 << 20)) for _ in range(400)) + c.flush(); x = zlib.decompress(z)",
    "a flood of both outputs": "import os\nwhile True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)",
    "a flood of lines": "import os\nwhile True: os.write(1, b'\\n')",
    "output from many": _FORKS + "while True: os.write(1, b'z' * 4096)",
    "escapes for a terminal": "print('\\x1b]0;x\\x07\\x1b[2J\\0' * 99999)",
    "a folder that grows names": "import os\nfor n in range(10_000): os.makedirs('d' * 200 + f'/{n}')",
    "links to itself": "import os\nfor n in range(2000): os.symlink('.', f'l{n}')",
    "hard links": "import os\nopen('f', 'w').close()\nfor n in range(2000): os.link('f', f'l{n}')",
    "a sparse file": "import os, time\nf = open('f', 'wb'); f.truncate(1 << 40); time.sleep(0.2)",
    "a file by fallocate": "import os\nf = open('f', 'wb'); os.posix_fallocate(f.fileno(), 0, 1 << 40)",
    "renames while it is looked at": "import os, time\nos.makedirs('a/b/c')\nend = time.time() + 0.6\nwhile time.time() < end:\n    os.rename('a', 'z'); os.rename('z', 'a')",
    "modes that hide files": "import os, time\nfor n in range(9):\n    os.mkdir(f'd{n}'); open(f'd{n}/f', 'wb').write(bytes(1 << 19)); os.chmod(f'd{n}', 0)\ntime.sleep(1)",
    "priority of a thousand wakes": "import threading, time\ndef spin():\n    end = time.time() + 0.5\n    while time.time() < end: time.sleep(0)\nfor _ in range(9): threading.Thread(target=spin).start()",
    "mappings that split": calling("import mmap\nm = mmap.mmap(-1, 64 << 20, flags=0x22)\na = ctypes.addressof(ctypes.c_char.from_buffer(m))\nfor n in range(0, 64 << 20, 8192): libc.mprotect(ctypes.c_void_p(a + n), 4096, 1)\nimport time; time.sleep(0.5)"),
    "fresh programs": "import os, time\nend = time.time() + 0.6\nif os.environ.get('N', '') != 'x': os.environ['N'] = 'x'\nwhile time.time() < end:\n    if os.fork() == 0: os.execv('/bin/true', ['true'])\n    os.wait()",
    "an exec of itself": "import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'i=0; while [ $i -lt 200 ]; do i=$((i+1)); (exec true); done'])",
    "a stop of itself": "import os; os.kill(os.getpid(), 19)",
    "a limit of its own at zero": "import resource as r\nfor k in range(16):\n    try: r.setrlimit(k, (0, 0))\n    except (OSError, ValueError): pass\nopen('f', 'w').write('x' * 9)",
    "a quit of everything": "import os\nfor n in range(1, 65):\n    try: os.kill(-1, n)\n    except OSError: pass",
}  # fmt: skip
