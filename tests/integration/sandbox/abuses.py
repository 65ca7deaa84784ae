"""Attacks on what calls share, in three kinds.

`GRABS` want a thing that no call may have; each prints ESCAPED if it got it. `HOGS` want more than their
share; a hog may end as it likes, as long as no limit is passed, nothing of it stays and the next call
runs. `GROWTHS` rest within their limit of memory, and then pass it as fast as they can: they must end.
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
    "userfaultfd": calling("escaped(call(323, 282, 1))"),
    "pages of the huge pool": calling("escaped(libc.mmap(None, 1 << 21, 3, 0x40022, -1, 0) != -1 or ctypes.get_errno() != 1 or -1)"),
    "huge pages by another size": calling("escaped(libc.mmap(None, 1 << 30, 3, 0x78040022, -1, 0) != -1 or ctypes.get_errno() != 1 or -1)"),
    "a file in memory of huge pages": calling("escaped(call(319, 279, b'x', 4 | 21 << 26))"),
    "shared memory without a file": calling("escaped(libc.mmap(None, 4096, 3, 0x21, -1, 0) != -1 or -1)"),
    "pages in a pipe by sendfile": calling("import os\nr, w = os.pipe()\nf = open('f', 'w+b'); f.write(bytes(9)); f.flush()\nescaped(call(40, 71, w, f.fileno(), ctypes.byref(ctypes.c_long()), 9))"),
    "pages in a pipe by a copy of a range": calling("import os\nr, w = os.pipe()\nf = open('f', 'w+b'); f.write(bytes(9)); f.flush()\nescaped(call(326, 285, f.fileno(), ctypes.byref(ctypes.c_long()), w, None, 9, 0))"),
    "a ring of packets": calling("escaped(call(41, 198, 17, 3, 0))"),
    "a device of memory": "import os\nfor n in ('mem', 'zero', 'shm/x', 'dma_heap/system', 'udmabuf', 'kvm'):\n    try: os.open('/dev/' + n, os.O_RDWR | os.O_CREAT)\n    except OSError: continue\n    print('ESCAPED', n)",
    "memory into its child": calling("p = os.fork()\nif p == 0:\n    import time; time.sleep(9)\nb = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\nr = call(310, 270, p, v, 1, v, 1, 0)\nos.kill(p, 9)\nescaped(r)"),
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
    # The fork gate and the checks.
    "a listener of its own": calling("f = (ctypes.c_char * 16)(1)\nescaped(call(317, 277, 1, 8, f))"),
    "an answer to its own gate": calling("import fcntl\nfor fd in range(64):\n    try: fcntl.ioctl(fd, 0xC0182101, bytes(24))\n    except OSError: continue\n    print('ESCAPED', fd)"),
    "its gate by recvmsg": "import socket\na, b = socket.socketpair()\nsocket.recv_fds(a, 1, 1); print('ESCAPED')",
    "processes by clone3": calling("a = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\nr = call(435, 435, a, 88)\nif r == 0: os._exit(0)\nescaped(r)"),
    "orphans of its own": calling("escaped(libc.prctl(36, 1, 0, 0, 0))"),
    "a process that hides": calling("escaped(libc.prctl(4, 0, 0, 0, 0))"),
    "a namespace of processes": calling("r = call(56, 220, 0x20000011, 0, 0, 0, 0)\nif r == 0: os._exit(0)\nescaped(r)"),
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

# Three processes that hold little until a look found nothing wrong, and then grow at once.
_REST = calling(
    "import mmap, os, socket, time\nbegin = time.monotonic() + 0.7\n"
    "def rest():\n    time.sleep(max(0, begin - time.monotonic()))\n"
    "def fresh(size, flags=0x22):\n"
    "    m = mmap.mmap(-1, size, flags=flags)\n"
    "    return m, ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    "def fill(size):\n    m, a = fresh(size); ctypes.memset(a, 1, size); return m\n"
)
_FEW = _REST + "for _ in range(2):\n    if os.fork() == 0: break\nrest()\n"

# Each wants more than the default limit, by a way of its own.
GROWTHS = {
    "pages that are written": _FEW + "m = fill(256 << 20); time.sleep(9)",
    "pages that come with their mapping": _FEW + "m = fresh(256 << 20, 0x8022); time.sleep(9)",
    "many small mappings with pages": _FEW + "kept = [mmap.mmap(-1, 1 << 18, flags=0x8022, prot=3 + n % 2 * 4) for n in range(1000)]; time.sleep(9)",
    "pages that advice brings": _FEW + "m, a = fresh(256 << 20); libc.madvise(ctypes.c_void_p(a), ctypes.c_size_t(256 << 20), 23); time.sleep(9)",
    "advice on huge pages": _FEW + "m, a = fresh(256 << 20); m.madvise(14); ctypes.memset(a, 1, 256 << 20); time.sleep(9)",
    "a mapping that moves and grows": _FEW + "libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p\nz = ctypes.c_size_t\na = libc.mmap(None, z(4 << 20), 3, 0x22, -1, z(0))\nb = libc.mremap(ctypes.c_void_p(a), z(4 << 20), z(256 << 20), 1); ctypes.memset(b, 1, 256 << 20); time.sleep(9)",
    "the heap": _FEW + "libc.sbrk.restype = ctypes.c_void_p\na = libc.sbrk(240 << 20); ctypes.memset(a, 1, 240 << 20); time.sleep(9)",
    "stacks": _FEW + "import threading\nthreading.stack_size(80 << 20)\ndef grow():\n    b = ctypes.create_string_buffer(8); a = ctypes.addressof(b); m = fill(64 << 20); time.sleep(9)\nfor _ in range(3): threading.Thread(target=grow).start()",
    "writes to what was shared": _REST + "x = fill(72 << 20)\nfor _ in range(2):\n    if os.fork() == 0: break\nrest()\nctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(x)), 2, 72 << 20); m = fill(160 << 20); time.sleep(9)",
    "a tree of forks that grow": _REST + "rest()\nkept = []\nfor _ in range(9):\n    kept.append(fill(24 << 20))\n    if os.fork(): break\ntime.sleep(9)",
    "forks that share it all": _REST + "x = fill(128 << 20); rest()\nfor _ in range(3):\n    if os.fork() == 0: break\nctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(x)), 2, 128 << 20); time.sleep(9)",
    "heirs of those that end": _REST + "rest()\nkept = [fill(80 << 20)]\nfor n in range(12):\n    kept.append(fill(32 << 20))\n    if os.fork(): os._exit(0) if n else time.sleep(9)\ntime.sleep(9)",
    "writes by a thread that ends": _FEW + "import threading\nkept = []\nfor n in range(16):\n    t = threading.Thread(target=lambda: kept.append(fill(16 << 20))); t.start(); t.join()\ntime.sleep(9)",
    "reads into fresh memory": _FEW + "f = open('/dev/urandom', 'rb', 0); m, a = fresh(256 << 20)\nfor o in range(0, 256 << 20, 4 << 20): f.readinto(memoryview(m)[o:o + (4 << 20)])\ntime.sleep(9)",
    "private pages of a file": _FEW + "f = open(f'f{os.getpid()}', 'w+b'); f.truncate(8 << 20); kept = []\nfor _ in range(32):\n    m = mmap.mmap(f.fileno(), 8 << 20, flags=2); a = ctypes.addressof(ctypes.c_char.from_buffer(m)); ctypes.memset(a, 1, 8 << 20); kept.append((m, a))\ntime.sleep(9)",
    "sockets that fill after a rest": _REST + "x = fill(40 << 20)\nfor _ in range(5):\n    if os.fork() == 0: break\nrest()\nkept = []\ntry:\n    while True: kept.append(socket.socketpair())\nexcept OSError: pass\nfor p in kept:\n    for s in p:\n        s.setblocking(False)\n        try:\n            while True: s.send(bytes(1 << 16))\n        except OSError: pass\ntime.sleep(9)",
}  # fmt: skip

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
    "children of its parent": calling("import time\nend = time.time() + 0.6\nwhile time.time() < end:\n    r = call(56, 220, 0x8011, 0, 0, 0, 0)\n    if r == 0: time.sleep(0.2); os._exit(0)"),
    "a chain of vforks": calling("import time\nfor _ in range(40):\n    r = call(56, 220, 0x4011, 0, 0, 0, 0)\n    if r < 0: break\ntime.sleep(0.3)\nos._exit(0)"),
    "forks that interrupt each other": "import os, signal, time\nsignal.signal(14, lambda *_: None)\nend = time.time() + 0.6\nwhile time.time() < end:\n    try:\n        if os.fork() == 0: signal.setitimer(0, 1e-4, 1e-4)\n    except OSError: pass",
    "files without names that grow": "import os, time\nkept = []\nfor n in range(9):\n    kept.append(open(f'f{n}', 'wb')); os.unlink(f'f{n}')\nfor _ in range(400):\n    for f in kept: f.write(bytes(1 << 16)); f.flush()\ntime.sleep(9)",
    "files that never had names": "import os, time\nkept = [os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(9)]\nfor _ in range(400):\n    for f in kept: os.write(f, bytes(1 << 16))\ntime.sleep(9)",
    "files that come and go": "import os, time\nend = time.time() + 1\nwhile time.time() < end:\n    for n in range(9): open(f'f{n}', 'wb').write(bytes(1 << 19))\n    for n in range(9): os.unlink(f'f{n}')",
    "pipes with names": "import os, time\nkept = []\nfor n in range(40):\n    os.mkfifo(f'p{n}'); fd = os.open(f'p{n}', os.O_RDWR | os.O_NONBLOCK); kept.append(fd)\n    try:\n        while True: os.write(fd, bytes(4096))\n    except OSError: pass\ntime.sleep(0.3)",
    "sockets that come and go": _FORKS + "end = time.time() + 0.8\nwhile time.time() < end:\n    kept = [socket.socketpair() for _ in range(15)]\n    for a, b in kept:\n        a.setblocking(False)\n        try:\n            while True: a.send(bytes(1 << 16))\n        except OSError: pass",
    "pages that stop to be shared": "import os, time\nx = bytearray(b'x' * (20 << 20))\nfor _ in range(9):\n    if os.fork() == 0: break\ntime.sleep(0.3)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(9)",
    "pages that come and go": _FEW + "end = time.monotonic() + 0.7\nwhile time.monotonic() < end: m = fill(12 << 20); del m",
    "processes that fault and end": _FEW + "end = time.monotonic() + 0.7\nwhile time.monotonic() < end:\n    if os.fork() == 0: fill(12 << 20); os._exit(0)\n    os.wait()",
    "children that nobody waits for": _REST + "import signal\nsignal.signal(17, signal.SIG_IGN); rest()\nend = time.monotonic() + 0.7\nwhile time.monotonic() < end:\n    try:\n        if os.fork() == 0: fill(30 << 20); os._exit(0)\n    except OSError: pass",
    "a file in the folder by fallocate": _REST + "rest()\nfor n in range(9):\n    with open(f'f{n}', 'wb') as f: os.posix_fallocate(f.fileno(), 0, 1 << 20)\ntime.sleep(9)",
    "a file in the folder by copies": _REST + "rest()\nopen('f', 'wb').write(bytes(1 << 20))\nfor n in range(9):\n    a, b = open('f', 'rb'), open(f'g{n}', 'wb'); os.copy_file_range(a.fileno(), b.fileno(), 1 << 20)\ntime.sleep(9)",
    "a program that nobody may read": "import os, shutil\nshutil.copy('/bin/sleep', 's'); os.chmod('s', 0o111)\nos.execv('./s', ['s', '9'])",
    "mappings of many processes": _FORKS + "import mmap\nkept = []\nfor n in range(5000): kept.append(mmap.mmap(-1, 4096, flags=0x22, prot=1 + n % 2))\ntime.sleep(9)",
}  # fmt: skip
