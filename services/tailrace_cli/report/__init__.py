"""What a run leaves for its reader: the summary table and `report.html` with its curves."""
