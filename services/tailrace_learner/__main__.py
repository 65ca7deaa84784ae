"""The learner's process.

With several ranks this process launches them: each rank is a process of this module, rank 0 the
service, the others its mirrors.
"""

import gc
import sys

from tailrace.import_path import load_object
from tailrace.log import configure
from tailrace.runtime import Args, run_with_args
from tailrace_learner.adapters.launcher import checked_config, ready_host, run_ranks
from tailrace_learner.adapters.ranks import launched_rank, leave

SERVICE = "learner"
_COMPUTES = "tailrace_learner.adapters.process:run"  # a launcher needs nothing that it imports


def run(args: Args) -> int:
    """Run as the launcher of the ranks, as the service, or as a mirror; returns the exit code."""
    config, rank = checked_config(args), launched_rank()
    if rank is not None or config.strategy_args.resolved_name != "single":
        ready_host(config)
        if rank is None:
            configure(service="learner", run=args.run.exp_name, instance_id=args.instance_id)
            argv = ["tailrace_learner", *sys.argv[1:]]
            return run_ranks(config.strategy_args, config.drain_s, "tailrace.start", argv)
    computes = load_object(_COMPUTES, "learner")
    gc.freeze()  # as `tailrace.start` does: a collection would look at all modules
    code: int = computes(args)
    return code


def main() -> int:
    """Run until a signal."""
    return leave(run_with_args(run))


if __name__ == "__main__":
    raise SystemExit(main())
