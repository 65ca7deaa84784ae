"""One module per command of `tailrace`."""
