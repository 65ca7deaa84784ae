"""Tiny configurations of model types that transformers has, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
# Taken where a type's configuration has the key.
_PARTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
_GEMMA_4 = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {},
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}

# Many heads: scores of two heads are often all zero, and what wins a tie hangs on the length.
_INDEXED = {"index_topk": 16, "index_n_heads": 32, "index_head_dim": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}

# A name is a model type, or one with a variant after a colon. The keys differ from those above; a
# model that also sees has the entry of its `text` part, as checkpoints of these types have.
ZOO: dict[str, dict[str, Any]] = {
    "afmoe": {"sliding_window": 16},
    "apertus": {},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1, 3]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_head": 4, "n_layer": 4},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_inner": 48},
    "cohere": {},
    "cohere2": {"sliding_window": 16, "sliding_window_pattern": 2},
    "cohere2_moe": {"sliding_window": 16},
    "ctrl": {"n_embd": 32, "n_head": 4, "n_layer": 2, "dff": 48},
    "cwm": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4, **_INDEXED},
    "deepseek_v4": {
        **_INDEXED,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe"] * 2,
    },
    "diffllama": {},
    "doge": {},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window": 16},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon:alibi": {"alibi": True, "num_kv_heads": 4, "new_decoder_architecture": False},
    "falcon_h1": {},
    "falcon_mamba": {"state_size": 8, "num_hidden_layers": 2},
    "flex_olmo": {},
    "fuyu": {},
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "gemma3": {"text": "gemma3_text", "vision_config": _VISION, "mm_tokens_per_image": 4},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 0,
        "sliding_window": 16,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": _GEMMA_4,
    "gemma4_text:experts": {
        **_GEMMA_4,
        "enable_moe_block": True,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "top_k_experts": 2,
    },
    "gemma4_text:shared_kv": {**_GEMMA_4, "num_kv_shared_layers": 2},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm_moe_dsa": {"num_key_value_heads": 4, **_INDEXED},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "gpt_neo": {
        "num_hidden_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    },
    "gpt_neox": {},
    "gpt_oss": {"sliding_window": 16},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_inner": 48},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granite_swa": {"sliding_window": 16},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "granitemoe_swa": {"sliding_window": 16},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "laguna": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {
        "sliding_window": 16,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "llama": {},
    "llama:dynamic": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama4": {"text": "llama4_text", "vision_config": {**_VISION, "vision_output_dim": 32}},
    "llama4_text": {
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 1, 0],
        "intermediate_size_mlp": 48,
    },
    "longcat_flash": {
        "num_key_value_heads": 4,
        "num_layers": 2,
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
    },
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "mamba2": {**_MAMBA2, "num_hidden_layers": 2, "chunk_size": 16},
    "mellum": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mimo_v2_flash": {},
    "minicpm3": {"num_key_value_heads": 4},
    "minimax": {"block_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m2": {},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "rotary_dim": 8,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
    },
    "ministral": {},
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mistral:window": {"sliding_window": 16},
    "mixtral": {"sliding_window": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo": {},
    "olmo:clip_qkv": {"clip_qkv": 0.2},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "olmo_hybrid": {},
    "olmoe": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi3:longrope": {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 64},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_5": {"text": "qwen3_5_text", "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"text": "qwen3_5_moe_text", "vision_config": _QWEN_VISION},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "recurrent_gemma": {"attention_window_size": 16, "lru_width": 32, "num_hidden_layers": 3},
    "seed_oss": {"residual_dropout": 0.1, "attention_dropout": 0.1},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None, "residual_dropout": 0.1},
    "vaultgemma": {"sliding_window": 16},
    "xlstm": {},
    "youtu": {"num_key_value_heads": 4},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],  # two layers have one block
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 8,
    },
}


def configuration(name: str, **changed: Any) -> Any:
    """Hugging Face configuration of an entry of `ZOO`; `changed` keys replace its own."""
    model_type = name.partition(":")[0]
    if "text" in ZOO[name]:
        others = {key: value for key, value in ZOO[name].items() if key != "text"}
        text = configuration(ZOO[name]["text"], **changed).to_dict()
        return AutoConfig.for_model(model_type, text_config=text, **others)
    known = AutoConfig.for_model(model_type)
    keys = {*dir(known), *known.attribute_map}
    sizes = _SIZES | {key: value for key, value in _PARTS.items() if key in keys}
    derived = {key for key in sizes if isinstance(getattr(type(known), key, None), property)}
    if "head_dim" not in keys:
        derived.add("head_dim")
    sizes = {key: value for key, value in sizes.items() if key not in derived}
    return AutoConfig.for_model(model_type, **(sizes | ZOO[name] | changed))


def make_model(name: str, seed: int = 0) -> Any:
    """Model of an entry of `ZOO`, with random weights and its own attention."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configuration(name), attn_implementation="eager").eval()
