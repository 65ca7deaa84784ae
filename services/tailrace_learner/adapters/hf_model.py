"""Models and tokenizers of Hugging Face: loads and makes them, checks them, describes and copies them.

Master weights are float32. Dropout is switched off: training computes what the engine sampled from.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.logging import disable_progress_bar

from tailrace.chat.model_files import present_folder
from tailrace.config import ConfigError, RunConfig
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.loaded_model import keep_weights, name_ties, unfit_weights
from tailrace.log import get_logger
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters.model_source import TOKENIZER_KEY, write_tokenizer
from tailrace_learner.adapters.ranks import pick_device
from tailrace_learner.config import FromScratch, LearnerConfig
from tailrace_learner.core.cpu.fast_layer import use_cpu_kernels
from tailrace_learner.core.cpu.kernels import select_matmul
from tailrace_learner.core.cpu.replacing import use_own_forwards
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.first_layers import first_layers_on
from tailrace_learner.core.model.forward_path import ForwardPath, UntrainableModelError
from tailrace_learner.core.model.path_check import Wish, choose_path, no_kernels
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)

CARD_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)

# Attention from separate packages, and a check that the package is installed and fits the device.
_READABLE = ("fp8", "mxfp4")  # quantized weights that transformers reads as the numbers they stand for
_FLASH = {
    "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
}


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model with its tokenizer, on the host or on its device (see `prepared`)."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters, tied ones once."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def load_model(
    source: str, config: LearnerConfig, key: str = "pretrain", *, needs_head: bool = True
) -> TrainableModel:
    """Load a model of a local directory or of the hub; `ConfigError` names `key` and the remedy.

    Without `needs_head` its output matrix may be missing.
    """
    name = str(present_folder(source, key) or source)
    load: Any = AutoModelForCausalLM.from_pretrained
    _check_attention(config)
    try:
        with foreign_code("transformers"):
            architecture = _unquantized(AutoConfig.from_pretrained(name, trust_remote_code=False))
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model, info = load(
                name,
                config=architecture,
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # they are named here
                output_loading_info=True,
                trust_remote_code=False,  # no question on the terminal
            )
    except ForeignCodeError as error:
        raise ConfigError(
            f"{key}: cannot load {source!r}: {_reason(error.error)}. Give a directory with "
            "config.json, weights and tokenizer, or a model of the hub that can be reached from here"
        ) from error
    allowed: set[str] = set() if needs_head else _head_weights(model)
    if reason := unfit_weights(model, info, allowed):
        raise ConfigError(f"{key}: {source!r} {reason}")
    name_ties(model)
    return TrainableModel(prepared(model, config), tokenizer)


def _reason(error: Exception) -> str:
    """Reason why transformers loads no model, in one line, without advice that nothing here takes."""
    text = " ".join(str(error).split()).partition(" Model type should be one of")[0]
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map in config.json), which is not run"
    return text or type(error).__name__


def _unquantized(architecture: Any) -> Any:
    """Lets quantized weights be read as numbers that can be trained; `ValueError` where that is not so.

    Left to themselves, some are read so on the CPU only: on a GPU all but norms would stay as they are.
    """
    given = getattr(architecture, "quantization_config", None)
    if not given:
        return architecture
    settings = given if isinstance(given, dict) else given.to_dict()
    method = settings.get("quant_method")
    if method not in _READABLE:
        raise ValueError(
            f"its weights are quantized ({method}) and cannot be trained: use the model that they were "
            "made of"
        )
    architecture.quantization_config = settings | {"dequantize": True}
    return architecture


def _head_weights(model: Any) -> set[str]:
    """Names of the weights of the output layer."""
    head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in head}


def make_model(scratch: FromScratch, config: LearnerConfig, seed: int) -> TrainableModel:
    """Make a model with random weights, equal for equal seeds."""
    tokenizer = build_tokenizer(scratch)
    architecture = scratch_architecture(scratch, tokenizer)
    _check_attention(config)
    torch.manual_seed(seed)
    try:
        with foreign_code("transformers"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                architecture, dtype=torch.float32, attn_implementation="eager"
            )
    except ForeignCodeError as error:
        raise ConfigError(f"learner.from_scratch: {error}") from error
    return TrainableModel(prepared(model, config), tokenizer)


def scratch_architecture(scratch: FromScratch, tokenizer: Any) -> Any:
    """Returns the Hugging Face configuration of a model from scratch."""
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    known = {"vocab_size": len(tokenizer), "initializer_range": scratch.init_std, **ids}
    try:
        with foreign_code("transformers"):
            architecture = AutoConfig.for_model(scratch.model_type, **(known | scratch.config))
    except ForeignCodeError as error:
        raise ConfigError(
            f"learner.from_scratch: {_reason(error.error)}: correct its config"
        ) from error
    if architecture.vocab_size < len(tokenizer):
        raise ConfigError(
            f"learner.from_scratch.config.vocab_size {architecture.vocab_size} is less than the "
            f"tokenizer's {len(tokenizer)}: leave it out"
        )
    return architecture


def first_model(run: RunConfig, config: LearnerConfig) -> TrainableModel:
    """Load or make the model of a new run."""
    if config.from_scratch is not None:
        return make_model(config.from_scratch, config, run.seed)
    return load_model(run.pretrain, config)


def build_tokenizer(scratch: FromScratch) -> Any:
    """Build the tokenizer that the user's function writes."""
    with tempfile.TemporaryDirectory(prefix="tailrace-tokenizer-") as folder:
        write_tokenizer(scratch, folder)
        try:
            with foreign_code(TOKENIZER_KEY):
                return AutoTokenizer.from_pretrained(folder)
        except ForeignCodeError as error:
            raise ConfigError(str(error)) from error


def _check_attention(config: LearnerConfig) -> None:
    """Raise `ConfigError` if the configured attention cannot run here."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    name = config.model_args.attn_implementation
    if name not in _FLASH:
        return
    key = f"learner.model_args.attn_implementation {name!r}"
    package, is_there = _FLASH[name]
    if pick_device(config).type != "cuda":
        raise ConfigError(f"{key} needs a CUDA device, torch sees none here: use packed")
    if not is_there():
        raise ConfigError(
            f"{key} needs the package {package} for this device: install it, or use packed"
        )


def prepared(model: Any, config: LearnerConfig) -> Any:
    """Prepare a model for training: without dropout, on its device, on a path that is right.

    With `fsdp2` it stays on the host: `fully_shard` moves each layer as it cuts it, so no device holds
    the whole model. The caller must move a model that is not cut.
    """
    _drop_nothing(model)
    keep_weights(model)
    device = pick_device(config)
    if config.strategy_args.resolved_name != "fsdp2":
        model.to(device)
    if not config.model_args.disable_gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(f"learner.model_args.disable_gradient_checkpointing: {error}") from error
    if device.type == "cpu":
        try:
            select_matmul(config.cpu_matmul)
        except ValueError as error:
            raise ConfigError(f"learner.{error}") from error
    pick_path(model, config)
    return model


def _drop_nothing(model: Any) -> None:
    """Set every probability of dropout to 0, also of those that are no modules."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if type(value) is float and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def pick_path(model: Any, config: LearnerConfig) -> ForwardPath:
    """Choose the way of rows through the model as it is now; `ConfigError` if none is right.

    It is checked on the device on which it will run, where a model that waits on the host to be cut is
    checked in its first layers.
    """
    attention.register()
    args, device = config.model_args, pick_device(config)
    is_packed = args.attn_implementation == "packed"
    wish = Wish(
        attention=attention.IMPLEMENTATION if is_packed else args.attn_implementation,
        packs=args.forward != "rows",
        rows=args.forward != "packed",
        shares_prefixes=config.shares_prefixes,
        autocast=args.dtype == "bfloat16",
        speed_up=use_cpu_kernels if device.type == "cpu" else no_kernels,
        slow_down=use_own_forwards,
    )
    began_s, waits = time.monotonic(), model.device.type != device.type
    seen: dict[str, Any] = {}
    try:
        with first_layers_on(model, device) if waits else nullcontext() as num_layers:
            if waits:
                seen = {"num_layers_checked": num_layers, "device": model.device.type}
            path = choose_path(model, wish)
    except UntrainableModelError as error:
        remedy = (
            "set learner.model_args.forward to auto, which then computes each row by itself"
            if args.forward == "packed"
            else "use another model (docs/models.md)"
        )
        raise ConfigError(f"{error}: {remedy}") from error
    if path.reason:
        seen["slower_because"] = path.reason
    took_s = round(time.monotonic() - began_s, 1)
    log.info("path of rows", model_type=model.config.model_type, path=path.name, took_s=took_s, **seen)
    return path


def narrow(model: Any) -> None:
    """Round the weights of linear layers to bfloat16, for a model that is not trained.

    Every pass in bfloat16 rounds them anyway, so no result changes. Norms and embeddings stay in
    float32, as in a pass, also if the embeddings are the output matrix.
    """
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embeddings:
            module.to(torch.bfloat16)


def make_policy(loaded: TrainableModel, config: LearnerConfig) -> PolicyModel:
    """Wrap the model for passes."""
    return PolicyModel(
        model=loaded.model,
        device=pick_device(config),
        temperature=config.temperature,
        logprob_chunk_tokens=config.logprob_chunk_tokens,
        autocast=config.model_args.dtype == "bfloat16",
    )


def model_card(loaded: TrainableModel, config: LearnerConfig) -> ModelCard:
    """Describe the model for other services; its configuration names the dtype of published weights."""
    with tempfile.TemporaryDirectory(prefix="tailrace-card-") as folder:
        loaded.tokenizer.save_pretrained(folder)
        written = {
            path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name in CARD_FILES
        }
        kept = loaded.model.config.dtype
        loaded.model.config.dtype = getattr(torch, config.model_args.dtype)
        loaded.model.config.save_pretrained(folder)
        loaded.model.config.dtype = kept
        config_json = (Path(folder) / "config.json").read_bytes()
    return ModelCard(config_json, written, trains_adapters=config.lora is not None)


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights and saved buffers under their Hugging Face names, tied ones once."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    saved = model.state_dict()
    yield from ((name, tensor) for name, tensor in saved.items() if name not in parameters)


def tensor_bytes(name: str, tensor: Tensor, dtype: str) -> TensorBytes:
    """Copy a tensor to the host, in `dtype` if it holds floating-point numbers."""
    wanted = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
    copy = tensor.detach().to("cpu", wanted, copy=True).contiguous()
    raw = copy.view(torch.uint8) if copy.dim() else copy.reshape(1).view(torch.uint8)
    data = raw.numpy().reshape(-1).data
    return TensorBytes(name, str(wanted).removeprefix("torch."), tuple(copy.shape), data)
