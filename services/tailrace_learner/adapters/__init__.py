"""Files and vendors of the learner: Hugging Face models, checkpoints, ranks, trackers."""
