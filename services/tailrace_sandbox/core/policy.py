"""System calls that tool code may make.

Invariants: what is not allowed here by name fails, also calls that future kernels add; nothing is
allowed that reaches past the call's own processes and files by a way that Landlock does not watch:
sockets other than a connected pair, namespaces, tracing, queues and memory with names, watches on other
folders, signals and scheduling of other processes, and memory or files that no limit counts. Nothing
that a call arms sends SIGCONT, so a stopped call runs again only when its zygote says so.
"""

import errno
from dataclasses import dataclass

from tailrace_sandbox.core.bpf import ALLOW, ASK, Compare, Rule, Verdict, assemble, refuse
from tailrace_sandbox.core.syscalls import AUDIT_ARCH, numbers

_ALLOWED = """
read write open close stat fstat lstat poll lseek mprotect munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore
madvise dup dup2 pause nanosleep getitimer alarm setitimer getpid sendto recvfrom shutdown
getsockname getpeername getsockopt fork vfork execve execveat exit wait4 uname flock
fsync fdatasync ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
readlink umask gettimeofday getrlimit getrusage sysinfo times getuid getgid geteuid getegid getppid
getpgrp getgroups getresuid getresgid getpgid getsid capget rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack mknod statfs fstatfs getpriority sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock arch_prctl
setrlimit gettid readahead time futex sched_getaffinity epoll_create getdents64 set_tid_address
restart_syscall fadvise64 clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl
waitid openat mkdirat
mknodat newfstatat unlinkat renameat linkat symlinkat readlinkat faccessat pselect6 ppoll
set_robust_list epoll_pwait timerfd_create eventfd timerfd_settime timerfd_gettime
eventfd2 epoll_create1 dup3 pipe2 preadv pwritev getcpu renameat2 getrandom membarrier
copy_file_range preadv2 pwritev2 statx rseq openat2 faccessat2 epoll_pwait2 futex_waitv
signalfd signalfd4
"""

_FORKS = ("fork", "vfork", "clone")

_METADATA = """
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
"""
"""Landlock does not watch these. Files of another user are safe from them; files of our own are not."""

_REFUSED = """
setsockopt connect accept accept4 bind listen sendmsg recvmsg sendmmsg recvmmsg ptrace process_vm_readv
process_vm_writev kcmp pidfd_open pidfd_getfd pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo
tkill unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount
fspick mount_setattr io_uring_setup io_uring_enter io_uring_register io_setup io_submit bpf keyctl
add_key request_key perf_event_open userfaultfd shmget shmat shmctl shmdt semget semop semctl
semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
mq_getsetattr memfd_secret inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
name_to_handle_at open_by_handle_at capset seccomp personality ioprio_set sched_setscheduler
sched_setparam sched_setattr kexec_load kexec_file_load init_module finit_module delete_module
reboot syslog swapon swapoff acct quotactl settimeofday clock_settime clock_adjtime adjtimex
sethostname setdomainname vhangup iopl ioperm modify_ldt process_madvise process_mrelease
migrate_pages move_pages get_robust_list vmsplice tee sync sync_file_range setuid setgid setreuid
setregid setgroups setresuid setresgid
"""

_NO_ATTRIBUTES = """
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr
"""

_REFUSE = refuse(errno.EPERM)
_PRETEND = refuse(0)
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_SIGCHLD, _SIGCONT = 17, 18
_EXIT_SIGNAL = 0xFF  # of clone's flags
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE_UNSHARE = 2
_NEGATIVE = 0x80000000
_TERMINAL_AND_FILE_REQUESTS = (0x5401, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
_PROCESS_OPTIONS = (
    3,
    15,
    16,
    23,
    38,
    39,
    0x53564D41,
)  # names, dumpable?, capability?, no_new_privs, VMA
_FILE_CONTROLS_REFUSED = (8, 10, 15, 1024, 1026, 1031)  # owner, signal, lease, notify, pipe size
_FILE_LOCKS = (6, 7, 37, 38)  # of ranges, by process and by descriptor


@dataclass(frozen=True)
class Confinement:
    """Confinement that is missing and that the filter replaces. `pid`: the call's first process."""

    machine: str  # as `platform.machine()`
    own_user: bool  # the call runs as a user that owns nothing else
    landlock_abi: int
    pid: int = 0


def filter_program(confinement: Confinement) -> bytes:
    """The seccomp program; raises `KeyError` for a machine that is neither x86_64 nor aarch64."""
    named = _by_name(confinement)
    number_of = numbers(confinement.machine)
    verdicts = {number_of[name]: verdict for name, verdict in named.items() if name in number_of}
    return assemble(AUDIT_ARCH[confinement.machine], verdicts, refuse(errno.ENOSYS))


def fork_gate_program(machine: str) -> bytes:
    """A second seccomp program, which asks its listener about every new process and thread."""
    number_of = numbers(machine)
    verdicts = {number_of[name]: ASK for name in _FORKS if name in number_of}
    verdicts[number_of["clone3"]] = refuse(errno.ENOSYS)
    return assemble(AUDIT_ARCH[machine], verdicts, ALLOW)


def _by_name(confinement: Confinement) -> dict[str, Verdict]:
    named: dict[str, Verdict] = dict.fromkeys(_ALLOWED.split(), ALLOW)
    named.update(dict.fromkeys(_REFUSED.split(), _REFUSE))
    named.update(dict.fromkeys(_NO_ATTRIBUTES.split(), refuse(errno.EOPNOTSUPP)))
    named.update(dict.fromkeys(_METADATA.split(), ALLOW if confinement.own_user else _PRETEND))
    # One process group for the whole call, so that one signal reaches all of it.
    named.update(dict.fromkeys(("setsid", "setpgid"), _PRETEND))
    # Without these programs take older calls, whose arguments a filter can see: the signal of a timer
    # is behind a pointer, and could be SIGCONT.
    named.update(dict.fromkeys(("clone3", "memfd_create", "timer_create"), refuse(errno.ENOSYS)))
    # Pipes and sockets would hold on to whole pages that no limit counts; everybody copies instead.
    named.update(dict.fromkeys(("sendfile", "splice"), refuse(errno.EINVAL)))
    # It takes any part of a disk at once, faster than any look; libraries write the blocks instead.
    named["fallocate"] = refuse(errno.EOPNOTSUPP)
    named["socket"] = refuse(errno.ENETUNREACH)  # which programs and models understand
    named["truncate"] = ALLOW if confinement.landlock_abi >= 3 else _REFUSE
    named.update(_with_arguments())
    named.update(_signals(confinement))
    return named


def _with_arguments() -> dict[str, Verdict]:
    own_process = Rule(((Compare(0, 0),),), _REFUSE)
    return {
        # A thread shares its process's files, whose list the zygote reads; the end of a process tells
        # its parent so, and nothing else.
        "clone": Rule(
            (
                (Compare(0, 0, _NEW_NAMESPACES | _CLONE_THREAD), Compare(0, _SIGCHLD, _EXIT_SIGNAL)),
                (Compare(0, 0, _NEW_NAMESPACES | _CLONE_THREAD), Compare(0, 0, _EXIT_SIGNAL)),
                (
                    Compare(
                        0,
                        _CLONE_THREAD | _CLONE_FILES,
                        _NEW_NAMESPACES | _CLONE_THREAD | _CLONE_FILES | _EXIT_SIGNAL,
                    ),
                ),
            ),
            _REFUSE,
        ),
        "close_range": Rule(((Compare(2, 0, _CLOSE_RANGE_UNSHARE),),), _REFUSE),
        "socketpair": Rule(((Compare(0, _AF_UNIX), Compare(1, _SOCK_STREAM, _SOCK_TYPE)),), _REFUSE),
        # Nobody would be charged for shared memory without a file, and for pages of the huge pool.
        "mmap": Rule(
            (
                (Compare(3, 0, _MAP_SHARED | _MAP_HUGETLB),),
                (Compare(3, 0, _MAP_ANONYMOUS | _MAP_HUGETLB),),
            ),
            _REFUSE,
        ),
        "ioctl": _one_of(1, _TERMINAL_AND_FILE_REQUESTS, errno.ENOTTY),
        "prctl": _one_of(0, _PROCESS_OPTIONS, errno.EPERM),
        # Locks of ranges take memory that no limit counts; within a call they always succeed.
        "fcntl": Rule(
            tuple((Compare(1, command),) for command in _FILE_CONTROLS_REFUSED),
            Rule(tuple((Compare(1, command),) for command in _FILE_LOCKS), ALLOW, _PRETEND),
            _REFUSE,
        ),
        "prlimit64": own_process,
        "sched_setaffinity": own_process,
        "setpriority": Rule(((Compare(0, 0), Compare(1, 0)),), _REFUSE),
    }


def _one_of(index: int, values: tuple[int, ...], otherwise: int) -> Rule:
    return Rule(tuple((Compare(index, value),) for value in values), refuse(otherwise))


def _signals(confinement: Confinement) -> dict[str, Verdict]:
    """Signals to groups are refused: there is one group, and `timeout` would end its own caller.

    Where Landlock does not keep signals among the call's own processes (before its ABI 6), only the
    call's first process may be signalled.
    """
    if confinement.landlock_abi >= 6:
        to_a_process: tuple[Compare, ...] = (Compare(0, 0, _NEGATIVE), Compare(0, 0, negated=True))
    else:
        to_a_process = (Compare(0, confinement.pid),)
    return {
        "kill": Rule(((*to_a_process, Compare(1, _SIGCONT, negated=True)),), _REFUSE),
        "tgkill": Rule(((*to_a_process, Compare(2, _SIGCONT, negated=True)),), _REFUSE),
    }
