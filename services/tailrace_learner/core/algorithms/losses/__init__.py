"""Policy losses, one file each, with formula and paper."""
