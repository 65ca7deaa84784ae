"""Which algorithms learn which environments on the demo's model: runs, verdict, page of results."""
