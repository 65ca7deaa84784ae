"""weight_sync: policy versions and their bytes."""
