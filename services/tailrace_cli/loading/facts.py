"""Messages between the command line and its loading process, and facts that the steps find."""

import msgspec


class Step(msgspec.Struct, frozen=True):
    """One thing to load. `key`: its place in the experiment; `kind`: a method of `process.Loader`."""

    kind: str
    key: str
    name: str = ""  # in its section, or the number of the entry
    runs_user_code: bool = False  # in a process that gets `cluster.keep_environment`


class Begin(msgspec.Struct, frozen=True):
    """First message to a loading process: the resolved experiment."""

    experiment: str
    source: str


class Begun(msgspec.Struct, frozen=True):
    """Its answer. `error`: the reason if it cannot decode the experiment."""

    error: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model; 0: unknown."""

    name: str
    context_tokens: int = 0
    num_parameters: int = 0
    vocab_size: int = 0
    num_tokens: int = 0  # of the tokenizer
    hidden_size: int = 0
    num_layers: int = 0
    kv_width: int = 0  # numbers of keys and values that one token has in all layers
    attention_width: int = 0  # numbers of a token's queries in one layer
    inner_size: int = 0  # of the feed-forward part, times the experts that compute a token
    num_tables: int = 1  # of one vector for each token: embeddings, and an output of their own
    has_head_norms: bool = False  # queries and keys are normalised, head by head
    dtype: str = "float32"  # that its configuration names
    role_sizes: dict[str, int] = {}  # parameters of models beside it: reference, critic


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of this machine. `gpu_bytes`: memory of each GPU that torch sees here."""

    host_bytes: int
    shm_bytes: int
    gpu_bytes: tuple[int, ...] = ()


class PromptFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Opening of the episodes of a tag, as far as it was read."""

    tag: str
    place: str  # of the longest prompt
    num_tokens: int = 0  # of the longest prompt; 0: unknown
    num_rows: int = 0  # of the data set; 0: unknown, or no data set
    loops: tuple[str, ...] = ()  # that play the rows that were read; empty: none, or a workflow
    digests: tuple[bytes, ...] = ()  # of the prompts of the rows that were read


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one step. `line`: what was found, for the summary."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    line: str = ""
    model: ModelFacts | None = None
    role_sizes: dict[str, int] = {}
    machine: MachineFacts | None = None
    prompt: PromptFacts | None = None
