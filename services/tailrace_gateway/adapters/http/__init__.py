"""The gateway's HTTP: a door that wants a key, one file per family of routes behind it."""
