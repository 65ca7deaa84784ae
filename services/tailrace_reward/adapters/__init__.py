"""Runners of reward components: function processes, models and judges."""
