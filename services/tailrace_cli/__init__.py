"""The command line and the local cluster: the composition root, alone allowed to import services."""
