"""The one payload of all transports: 2,000 prompt ids in, 500 ids and log-probabilities out."""

from __future__ import annotations

import numpy as np

NUM_PROMPT = 2000
NUM_GENERATED = 500

PROMPT = np.arange(NUM_PROMPT, dtype=np.int32)
GENERATED = np.arange(NUM_GENERATED, dtype=np.int32)
LOGPROBS = np.linspace(-5.0, 0.0, NUM_GENERATED, dtype=np.float32)
