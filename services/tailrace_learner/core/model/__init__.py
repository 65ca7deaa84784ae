"""Models: the policy, the critic and the reference, and attention over packed rows."""
