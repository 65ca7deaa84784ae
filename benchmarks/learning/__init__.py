"""Learning of algorithms and environments on the demo's model: runs, verdict, page of results."""
