"""Algorithms: advantage estimators, losses, corrections, aggregations, divergences."""
