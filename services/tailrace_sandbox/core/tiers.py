"""Confinement that a machine can give, from the features of its kernel."""

from dataclasses import dataclass
from typing import Any

TIERS = ("none", "partial", "full")


@dataclass(frozen=True)
class Features:
    """Findings of a probe, made in the place and as the user of tool code."""

    machine: str  # as `platform.machine()`
    landlock_abi: int  # 0: none
    seccomp: bool
    is_root: bool
    own_user: bool  # root may give calls users of their own
    counts_forks: bool  # a zygote may decide on each fork of a call (seccomp's user notification)
    lists_children: bool  # /proc tells which processes a process started

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Features":
        """As the probe writes it."""
        return cls(**content)


@dataclass(frozen=True)
class Finding:
    """One line of a report: a feature, what it is here, and what to do if it is missing."""

    what: str
    state: str
    remedy: str = ""

    @property
    def is_fine(self) -> bool:
        """Tell whether nothing needs to be done."""
        return not self.remedy


def tier(features: Features) -> str:
    """`full`: files, calls, processes and memory are all confined; `partial`: some; else `none`."""
    missing = [finding for finding in findings(features) if not finding.is_fine]
    if not missing:
        return "full"
    return "partial" if features.landlock_abi or features.seccomp else "none"


def findings(features: Features) -> tuple[Finding, ...]:
    """State of each feature here."""
    return (
        Finding(
            "Landlock (files)",
            f"ABI {features.landlock_abi}" if features.landlock_abi else "missing",
            "" if features.landlock_abi else "Linux 5.13 or later with landlock in its list of LSMs",
        ),
        Finding(
            "seccomp (system calls)",
            features.machine if features.seccomp else "missing",
            "" if features.seccomp else "x86_64 or aarch64 and a kernel with seccomp filters",
        ),
        Finding("user of tool code", *_user(features)),
        Finding(
            "limit of processes",
            "exact"
            if features.own_user or features.counts_forks
            else "the kernel's, with room for other processes of the user",
        ),
        Finding(
            "process list (limits of whole calls)",
            "present" if features.lists_children else "missing",
            "" if features.lists_children else "/proc and a kernel with CONFIG_PROC_CHILDREN",
        ),
    )


def _user(features: Features) -> tuple[str, str]:
    if features.own_user:
        return "one of its own per process", ""
    if not features.is_root:
        return "the service's", ""
    return "root", "run as another user: the kernel does not count the processes of root"
