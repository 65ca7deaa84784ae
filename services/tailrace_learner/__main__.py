"""The learner's process.

With several ranks this process launches them: each rank is a process of this module, rank 0 the
service, the others its mirrors.
"""

import gc
import importlib
import sys

from tailrace.log import configure
from tailrace.runtime import Args, run_with_args
from tailrace.start import no_garbage_collection
from tailrace_learner.adapters.launcher import checked_config, ready_host, run_ranks
from tailrace_learner.adapters.ranks import launched_rank, leave

_COMPUTES = "tailrace_learner.adapters.process"  # a launcher needs nothing that it imports


def run(args: Args) -> int:
    """Run as the launcher of the ranks, as the service, or as a mirror; returns the exit code."""
    config, rank = checked_config(args), launched_rank()
    if rank is not None or config.strategy_args.resolved_name != "single":
        ready_host(config)
        if rank is None:
            configure(service="learner", run=args.run.exp_name, instance_id=args.instance_id)
            argv = ["tailrace_learner", *sys.argv[1:]]
            return run_ranks(config.strategy_args, config.drain_s, "tailrace.start", argv)
    with no_garbage_collection():
        process = importlib.import_module(_COMPUTES)
    gc.freeze()  # as `tailrace.start` does: a collection would look at all modules
    code: int = process.run(args)
    return code


def main() -> int:
    """Run until a signal."""
    return leave(run_with_args(run))


if __name__ == "__main__":
    raise SystemExit(main())
