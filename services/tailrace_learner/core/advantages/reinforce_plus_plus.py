"""REINFORCE with the whole step as baseline.

    A_t = whitened over the step: sum over s >= t of gamma^(s - t) (r_s - beta KL_s)

`reinforce`, always whitened over all trained tokens of the step; therefore it waits for the whole
step. The paper's divergence from a reference model is had with `init_kl_coef` beta and
`kl_in: reward`; with a coefficient of 0 there is none.

Hu et al. 2025, "REINFORCE++", arXiv:2501.03262.
"""

from __future__ import annotations

from tailrace_learner.core.advantages.reinforce import reinforce

reinforce_plus_plus = reinforce
