"""The inference service's vendors: channel, weights, disk, and the in-process policy."""
