"""`report.html` of a run, and the page that compares runs: single files without outside requests."""
