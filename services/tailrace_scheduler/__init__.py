"""The scheduler: admission, groups, placement leases, data order and the end of a run."""
