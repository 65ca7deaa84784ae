"""weight_sync: policy versions and the bytes behind them."""
