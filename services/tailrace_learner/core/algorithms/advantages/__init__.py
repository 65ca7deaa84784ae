"""Advantage estimators, one file each, with formula and paper.

All of them leave rows of invalid members (infra_failure, timeout, cancelled) out of every statistic.
Those that compare the members of a group give advantage 0 to groups with fewer than two valid ones;
the others need one.
"""
