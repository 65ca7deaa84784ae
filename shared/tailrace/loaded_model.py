"""Faults of a loaded model of transformers that its loader passes over, for learner and engine."""

from collections.abc import Container, Mapping
from typing import Any


def unfit_weights(model: Any, loading_info: Mapping[str, Any], allowed: Container[str] = ()) -> str:
    """Reason why a folder's weights are not this model's, with the remedy; empty if they are.

    `loading_info` is that of `from_pretrained`, told to ignore other sizes. Weights that are `allowed`
    may be missing.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return (
            "holds adapters (adapter_config.json) beside a model: give a folder in which they are "
            "merged with its weights, or remove them"
        )
    if loading_info["mismatched_keys"]:
        name, found, needed = min(loading_info["mismatched_keys"])
        return (
            f"has the weight {name} of shape {tuple(found)}, and its config.json asks for "
            f"{tuple(needed)}: copy or download the model again"
        )
    missing = sorted(name for name in loading_info["missing_keys"] if name not in allowed)
    if missing:
        return (
            f"lacks the weights of {', '.join(missing[:3])}, which would be random: give a whole model "
            "for text generation"
        )
    return ""


def name_ties(model: Any) -> bool:
    """Lets the configuration say that the output matrix is one of its own where files hold both.

    Those who read it would take one matrix for both otherwise. Returns True if it said so.
    """
    head: Any = model.get_output_embeddings()
    if getattr(head, "weight", None) is model.get_input_embeddings().weight:
        return False
    said = [
        each
        for each in (model.config, model.config.get_text_config())
        if getattr(each, "tie_word_embeddings", False)
    ]
    for each in said:
        each.tie_word_embeddings = False
    return bool(said)


def keep_weights(model: Any) -> None:
    """Lets a pass leave the weights as they are.

    RWKV divides some by powers of two in evaluation, for half precision, so that its results stay the
    same; whoever read them then would read other weights.
    """
    if getattr(model.config, "rescale_every", 0):
        model.config.rescale_every = 0
