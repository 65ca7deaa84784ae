"""The scheduler's vendors, one a file."""
