"""The learner: weights, optimizer, advantages, losses, checkpoints."""
