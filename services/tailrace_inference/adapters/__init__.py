"""Channel servers, weights, emission log, and the policy within one process."""
