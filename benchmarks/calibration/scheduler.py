"""The scheduler service with the placement of a baseline, for the calibration.

`python -m benchmarks.calibration.scheduler --placement verl_least_in_flight --config FILE`. The service
has no key for other placements, since ours is its only one.
"""

import sys
from functools import partial

from benchmarks.scheduling.policies import POLICIES
from tailrace_scheduler import __main__ as service
from tailrace_scheduler.core import streaming
from tailrace_scheduler.core.streams.core import StreamCore


def main() -> int:
    """Run the service; returns its exit code."""
    place = sys.argv.index("--placement")
    name = sys.argv[place + 1]
    del sys.argv[place : place + 2]
    setattr(streaming, "StreamCore", partial(StreamCore, placement=POLICIES[name]))  # noqa: B010
    return service.main()


if __name__ == "__main__":
    sys.exit(main())
