"""Choice of a model's head at load: a matrix that fused kernels take, or the module as it is."""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace_learner.core.model.forward_path import UntrainableModelError, decoder_of, own_logits

_LOUD = 1e3  # spread of logits beyond every cap


@torch.no_grad()
def head_kind(model: Any, token_ids: NDArray[np.int64]) -> Literal["matrix", "own"]:
    """Head that gives the model's own logits; raises `UntrainableModelError`."""
    model_type = str(model.config.model_type)
    if decoder_of(model) is model:
        raise UntrainableModelError(model_type, "its decoder is no module of its own")
    caught: list[Any] = []
    hook = decoder_of(model).register_forward_hook(lambda m, args, output: caught.append(output))
    ids = torch.from_numpy(token_ids).to(model.get_input_embeddings().weight.device).unsqueeze(0)
    try:
        with foreign_code("the plain model"):
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            hidden = caught[0].last_hidden_state[0]
            own = own_logits(model, hidden).float()
            # A cap leaves the small logits of a new model as they are.
            loud = hidden.float() * (_LOUD / logits.std().clamp_min(1e-6))
            of_loud = own_logits(model, loud.to(hidden)).float()
    except ForeignCodeError as error:
        raise UntrainableModelError(model_type, str(error)) from error
    finally:
        hook.remove()
    if not torch.isfinite(logits).all():
        raise UntrainableModelError(model_type, _infinite(model))
    if not _alike(own, logits):
        raise UntrainableModelError(model_type, "its logits depend on more than hidden states")
    weight: Any = getattr(model.get_output_embeddings(), "weight", None)
    fits = weight is not None and weight.shape == (logits.shape[-1], hidden.shape[-1])
    if not fits or not logits.std() > 0:
        return "own"
    matrix = weight.float().t()
    is_matrix = _alike(hidden.float() @ matrix, logits) and _alike(loud @ matrix, of_loud)
    return "matrix" if is_matrix else "own"


def _infinite(model: Any) -> str:
    """Reason why logits are not finite: the first weight that holds such a number, or another."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return f"its weight {name} holds numbers that are not finite"
    return "its logits are not finite, though its weights are"


def _alike(found: Tensor, expected: Tensor) -> bool:
    scale = float(expected.std()) or 1.0
    return bool((found - expected).abs().max() <= 1e-3 * scale)
