"""The learner's decisions and arithmetic: rows, advantages, losses, passes, steps. No bus."""
