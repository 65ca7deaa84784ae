"""Summary table of a run and `report.html` with its curves."""
