"""Behaviour corrections, one file each; `base` has the formulas and the geometric mask."""
