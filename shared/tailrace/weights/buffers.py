"""Host memory of versions that arrive over the network.

Invariant: no function here holds Python's lock in proportion to a version. A `bytearray` does: its
zeros and its copies stop every thread of a server, the event loop too, for seconds where the model has
billions of parameters, so that callers count the server as dead.
"""

import numpy as np


def new_buffer(num_bytes: int) -> memoryview:
    """Writable memory whose bytes are undefined; its pages come as they are written."""
    return np.empty(num_bytes, np.uint8).data


def copied(data: memoryview) -> memoryview:
    """A writable copy. It takes time: call it in a thread."""
    buffer = new_buffer(data.nbytes)
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8))
    return buffer
