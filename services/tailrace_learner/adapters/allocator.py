"""glibc's allocator, told to keep what is freed.

Every pass allocates the same activations again. By default large blocks go back to the kernel each time
and are mapped anew, page by page, which costs more than computing on them for small models.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Set the thresholds; False where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    settings = (
        (_M_ARENA_MAX, 1),  # heaps of other threads are small and shrink eagerly
        (_M_MMAP_THRESHOLD, 32 * _MIB),  # the largest that glibc accepts
        (_M_TRIM_THRESHOLD, 1024 * _MIB),
        (_M_TOP_PAD, 64 * _MIB),
    )
    return all(library.mallopt(option, value) == 1 for option, value in settings)
