"""Child process that loads what an experiment names, one step after another; `checks` starts it.

It has the environment variables, the folder and the import path of the services, so that a step finds
what a service would find. A step that raises or calls `sys.exit` is a problem of that step.
"""

import asyncio
import hashlib
import importlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tailrace.chat import Renderer, TemplateError
from tailrace.chat.model_files import (
    UNREAD,
    Vocabulary,
    card_tokens,
    check_same_tokens,
    model_folder,
    read_chat_model,
    read_model_card,
)
from tailrace.config import SECTIONS, ConfigError
from tailrace.data import Row, first_rows, prompt_messages
from tailrace.data.rows import COMPLETED
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.object_store import is_url
from tailrace.processes import ParentLink
from tailrace.scorers.registry import check_truth, scorer_for
from tailrace.sdk.tool import as_offer
from tailrace.tools.serving import load_tool
from tailrace_agents.adapters.player_factory import check_row, made_env
from tailrace_agents.adapters.workflow_pool import start_runner
from tailrace_agents.core.environments import EnvHandle
from tailrace_agents.core.loops import AGENT_LOOPS, agent_loops
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.cluster.permissions import SANDBOX_TOOLS
from tailrace_cli.experiment import Experiment, decode
from tailrace_cli.loading.facts import Begin, Begun, Loaded, ModelFacts, PromptFacts, Step
from tailrace_cli.loading.first_step import MAX_STEP_S, notes_of_first_step
from tailrace_cli.loading.machine import machine_facts
from tailrace_cli.loading.model_facts import counted_parameters, model_facts
from tailrace_learner.adapters.model_source import (
    DEMONSTRATIONS_KEY,
    demonstration_arrays,
    demonstration_pairs,
    fetched_folder,
    scratch_card,
)
from tailrace_learner.adapters.trackers import tracker_makers
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem
from tailrace_protos.weights import ModelCard
from tailrace_reward.adapters.components import check_component
from tailrace_reward.adapters.judge import Judge

_OTHER_TEMPLATE = "correct it, or put another chat_template.jinja beside the model"
_NUM_ROWS = 32  # of a data set, from its start
_NUM_DEMONSTRATIONS = 8
_GREETING = (ChatMessage("user", "Hello."),)


class Loader:
    """Loads the parts of one experiment; every method but `load` is a kind of step."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._tools: dict[str, ToolSchema] = {}

    def load(self, step: Step) -> Loaded:
        """Runs one step; the problems that it finds name the step's key."""
        run: Callable[[Step], Loaded] = getattr(self, step.kind)
        try:
            with foreign_code(step.key):
                return run(step)
        except ForeignCodeError as error:
            known = isinstance(error.error, ValueError | ForeignCodeError)
            return Loaded(problems=(self._placed(step, str(error.error if known else error)),))
        except SystemExit as error:
            reason = f"it ended its process ({error!r}), as no code may that a service calls"
            return Loaded(problems=(self._placed(step, reason),))

    def _placed(self, step: Step, problem: str) -> str:
        text = problem.removeprefix(self._experiment.source).removeprefix(": ")
        return text if _KEY.match(text) else f"{step.key}: {text}"

    @cached_property
    def _source(self) -> tuple[str, ModelCard, Path | None]:
        """Name, model card and, of a local model, the folder; `ConfigError` if it cannot be read."""
        run, learner = self._experiment.run, self._experiment.learner
        resumed = _resumed(self._experiment)
        if resumed is None and learner.from_scratch is not None:
            scratch = learner.from_scratch
            return f"{scratch.model_type} from scratch", scratch_card(scratch), None
        name = run.pretrain if resumed is None else str(resumed)
        key = "pretrain" if resumed is None else "resume_from_checkpoint"
        folder = fetched_folder(name, key)
        return name, _card_of(folder, key), folder if Path(os.path.expanduser(name)).is_dir() else None

    @cached_property
    def _renderer(self) -> Renderer | None:
        """None for a model without a tokenizer or template of use, which the step `model` reports."""
        try:
            return self._checked_renderer()
        except (ConfigError, TemplateError):
            return None

    def _checked_renderer(self) -> Renderer:
        renderer = Renderer.from_model_card(self._source[1], self._experiment.run.chat)
        renderer.opening_ids(_GREETING)
        if self._experiment.agents.custom_envs:
            renderer.require_plain_turns()
        return renderer

    @cached_property
    def _facts(self) -> ModelFacts:
        name, card, _ = self._source
        return model_facts(name, card.config_json, num_tokens=max(card_tokens(card).values()) + 1)

    def model(self, step: Step) -> Loaded:
        """Configuration, tokenizer, chat template and parsers; renders one prompt."""
        folder = self._source[2]
        try:
            self._checked_renderer()
            facts = self._facts
        except TemplateError as error:
            remedy = "" if error.template == UNREAD else f": {_OTHER_TEMPLATE}"
            raise ConfigError(f"{step.key}: {error}{remedy}") from error
        if facts.num_tokens > facts.vocab_size:
            raise ConfigError(
                f"{step.key}: the tokenizer has {facts.num_tokens} tokens and the model's vocabulary "
                f"{facts.vocab_size}: give the tokenizer that belongs to the model"
            )
        if folder is not None and (counted := counted_parameters(folder, step.key)):
            facts = msgspec.structs.replace(facts, num_parameters=counted)
        return Loaded(model=facts)

    def architecture(self, step: Step) -> Loaded:
        """The model itself, without weights; needs torch."""
        architecture: Any = importlib.import_module("tailrace_cli.loading.architecture")
        config_json = self._source[1].config_json
        found: int = architecture.num_parameters(config_json, self._experiment, step.key)
        return Loaded(model=msgspec.structs.replace(self._facts, num_parameters=found))

    def sizes(self, step: Step) -> Loaded:
        """Sizes of the model from its configuration alone: the file `step.name`, or the model's own."""
        name, config_json = step.name, b""
        if name:
            try:
                config_json = Path(os.path.expanduser(name)).read_bytes()
            except OSError as error:
                raise ConfigError(f"--model-config {name}: {error.strerror}") from error
        elif self._experiment.learner.from_scratch is None:
            name = self._experiment.run.pretrain
            config_json = (fetched_folder(name, step.key) / "config.json").read_bytes()
        else:
            name, card, _ = self._source
            config_json = card.config_json
        architecture: Any = importlib.import_module("tailrace_cli.loading.architecture")
        found: int = architecture.num_parameters(config_json, self._experiment, step.key)
        name = self._experiment.run.pretrain or name
        return Loaded(
            model=msgspec.structs.replace(model_facts(name, config_json), num_parameters=found)
        )

    def role(self, step: Step) -> Loaded:
        """Model of another role of the learner: it must read the policy's tokens."""
        folder = fetched_folder(step.name, step.key)
        is_local = model_folder(step.name, step.key) is not None
        counted = counted_parameters(folder, step.key) if is_local else 0
        theirs = _card_of(folder, step.key)
        facts = model_facts(step.name, theirs.config_json)
        ours = Vocabulary(card_tokens(self._source[1]), self._facts.vocab_size)
        check_same_tokens(step.key, step.name, ours, Vocabulary(card_tokens(theirs), facts.vocab_size))
        return Loaded(role_sizes={step.key.split(".")[1]: counted or facts.num_parameters})

    def warm_start(self, step: Step) -> Loaded:
        """Function of the demonstrations; reads its first rows."""
        warm, renderer = self._experiment.learner.warm_start, self._renderer
        assert warm is not None
        if renderer is None:
            return Loaded()
        pairs = demonstration_pairs(warm, renderer, self._experiment.run.seed, _NUM_DEMONSTRATIONS)
        pair = next(pairs, None)
        if pair is None:
            raise ConfigError(f"{DEMONSTRATIONS_KEY}: {warm.demonstrations} yields no row")
        try:
            with foreign_code(DEMONSTRATIONS_KEY):
                demonstration_arrays(pair, self._source[1])
        except ForeignCodeError as error:
            raise ConfigError(f"{DEMONSTRATIONS_KEY}: {warm.demonstrations}: {error.error}") from error
        return Loaded()

    def trackers(self, _step: Step) -> Loaded:
        """Classes, packages and arguments of all trackers; makes none."""
        tracker_makers(self._experiment.run, self._experiment.learner.chosen_trackers)
        return Loaded()

    def loop(self, step: Step) -> Loaded:
        """One agent loop of the user's."""
        agent_loops({step.name: self._experiment.agents.agent_loops[step.name]}, "agents.agent_loops")
        return Loaded()

    def environment(self, step: Step) -> Loaded:
        """Makes an environment, resets it, gives it an empty reply; measures its first observation."""
        entry = self._experiment.agents.custom_envs[step.name]
        handle = EnvHandle(made_env(entry, step.key))
        try:
            beginning = asyncio.run(handle.reset(0))
            most_s = min(MAX_STEP_S, self._experiment.cluster.check_timeout_s / 4)
            notes = tuple(notes_of_first_step(handle, step.key, most_s))
        finally:
            handle.close()
        num_tokens, place = 0, "the first observation"
        if self._renderer is not None:
            num_tokens = len(self._renderer.observation_ids(beginning.observation, first=True))
        facts = PromptFacts(tag=step.name, place=place, num_tokens=num_tokens)
        return Loaded(prompt=facts, notes=notes, line=f"{step.name}: environment {entry.env_type}")

    def dataset(self, step: Step) -> Loaded:
        """Reads the first rows of a data set, checks their loops and renders their prompts."""
        agents = self._experiment.agents
        rows = first_rows(agents.datasets[step.name], _NUM_ROWS, step.key)
        notes: tuple[str, ...] = ()
        names: tuple[str, ...] = ()
        num_tokens, place = 0, rows[0].origin
        for row in rows:
            self._check_scorers(row)
        if not agents.is_played_by_workflow(step.name):
            loops = {**agents.agent_loops, **AGENT_LOOPS}  # those of the user's are steps of their own
            for row in rows:
                check_row(row, loops)
            names = tuple(sorted({row.data["agent_name"] for row in rows}))
            notes = tuple(self._unserved(rows, step))
            num_tokens, place = max(self._lengths(rows), default=(0, place))
        num_rows = len(rows) if len(rows) < _NUM_ROWS else 0
        facts = PromptFacts(
            tag=step.name,
            place=place,
            num_tokens=num_tokens,
            num_rows=num_rows,
            loops=names,
            digests=tuple(map(_digest, rows)),
        )
        columns = ", ".join(sorted(rows[0].data.keys() - COMPLETED))
        return Loaded(prompt=facts, notes=notes, line=f"{step.name}: data set with columns {columns}")

    def _lengths(self, rows: list[Row]) -> Iterator[tuple[int, str]]:
        if self._renderer is None:
            return
        for row in rows:
            if "prompt" not in row.data:
                continue
            tools = [self._tools[name] for name in row.data["tools"] if name in self._tools]
            try:
                ids = self._renderer.opening_ids(prompt_messages(row.data), tools)
            except TemplateError as error:
                raise ConfigError(
                    f"{row.origin}: the chat template refuses its prompt: {error}"
                ) from error
            yield len(ids), row.origin

    def _check_scorers(self, row: Row) -> None:
        """Raises `ConfigError` for a row that a scorer cannot read, or no judge can be asked about."""
        source = str(row.data.get("data_source") or "")
        for entry in self._experiment.reward.components:
            if entry.kind not in ("scorer", "judge"):
                continue
            try:
                with foreign_code("reading the row"):
                    name = entry.scorer or entry.kind
                    if name == "scorer":
                        name = scorer_for(source, entry.sources)
                    check_truth(name, row.data)
                    if name == "judge" and entry.judge is not None:
                        Judge(entry.name, entry.judge, entry.timeout_s).prompt_for(_unplayed(row))
            except ForeignCodeError as error:
                raise ConfigError(f"{row.origin}: reward {entry.name!r}: {error.error}") from error

    def _unserved(self, rows: list[Row], step: Step) -> Iterator[str]:
        served = {*self._tools, *(SANDBOX_TOOLS if self._experiment.cluster.num_sandboxes else ())}
        for name in sorted({name for row in rows for name in row.data["tools"]} - served):
            yield (
                f"{step.key}: its rows use the tool {name!r}, which this run serves nowhere: list it "
                "in cluster.tool_workers, or serve it by `tailrace tools serve`"
            )

    def workflow(self, _step: Step) -> Loaded:
        """Makes the workflow, in the interpreter that will play it."""
        args = self._experiment.agents.workflow
        assert args is not None

        async def started() -> None:
            if (runner := await start_runner(args, self._experiment.source)) is not None:
                await runner.close()

        asyncio.run(started())
        return Loaded(line=f"workflow: {args.agent or 'agents outside'}")

    def reward(self, step: Step) -> Loaded:
        """Function, judge or model of one component; asks no judge and loads no weights."""
        entry = self._experiment.reward.components[int(step.name)]
        check_component(entry, step.key)
        if entry.kind == "model":
            folder = fetched_folder(entry.pretrain, f"{step.key}.pretrain")
            try:
                read_chat_model(_card_of(folder, f"{step.key}.pretrain"), {})
            except TemplateError as error:
                raise ConfigError(f"{step.key}.pretrain: {entry.pretrain}: {error}") from error
        return Loaded()

    def tool(self, step: Step) -> Loaded:
        """Tools of one worker."""
        names = self._experiment.cluster.tool_workers[int(step.name)].split()
        if not names:
            raise ConfigError(f"{step.key}: it names no tool: write module:name, or remove the entry")
        found = {tool.spec.name: tool.spec.schema for tool in map(as_offer, map(load_tool, names))}
        self._tools |= found
        return Loaded(line=f"tools: {', '.join(sorted(found))}")

    def machine(self, step: Step) -> Loaded:
        """Memory and GPUs; torch is asked only where a GPU may be."""
        return Loaded(machine=machine_facts(asks_torch=bool(step.name)))


_KEY = re.compile(rf"(pretrain|resume_from_checkpoint|({'|'.join(('chat', *SECTIONS))})\.[^\s:]+)[: ]")


def _unplayed(row: Row) -> ScoreItem:
    """An episode of a row with an empty reply; every metric is 0."""
    asked = prompt_messages(row.data) if "prompt" in row.data else ()
    messages = (*asked, ChatMessage("assistant", ""))
    return ScoreItem("", EnvTask("", 0, 0, row.data), messages, (), defaultdict(float))


def _digest(row: Row) -> bytes:
    """Short hash of a row's prompt, or of all of a row without one."""
    content = msgspec.msgpack.encode(row.data.get("prompt") or row.data)
    return hashlib.blake2b(content, digest_size=8).digest()


def _resumed(experiment: Experiment) -> Path | None:
    """Checkpoint that the run continues from, if any."""
    resume = experiment.run.resume_from_checkpoint
    if isinstance(resume, str):
        found = Path(resume)
        return found if is_url(resume) or found.is_dir() else None  # `_check_resume` refuses it
    try:
        return newest_checkpoint(experiment.run.run_dir) if resume else None
    except ConfigError:
        return None  # the learner says whether that is wrong


def _card_of(folder: Path, key: str) -> ModelCard:
    """Model card of a folder; a slow tokenizer is converted, as the learner does."""
    card = read_model_card(folder)
    if "tokenizer.json" in card.tokenizer_files:
        return card
    if not any(
        re.match(r"(vocab|.*tokenizer.*|spiece)\.(json|txt|model)$", path.name)
        for path in folder.iterdir()
    ):
        raise ConfigError(f"{key}: {folder} holds no tokenizer: save it beside the model")
    architecture: Any = importlib.import_module("tailrace_cli.loading.architecture")
    converted: ModelCard = architecture.converted_card(folder, key)
    return converted


def main() -> int:
    """Decode the experiment, then run steps until the input ends."""
    link = ParentLink.open()
    begin = link.receive(msgspec.msgpack.Decoder(Begin))
    if begin is None:
        return 0
    try:
        loader = Loader(decode(yaml.safe_load(begin.experiment), begin.source))
    except ConfigError as error:
        link.send(Begun(str(error)))
        return 0
    link.send(Begun())
    steps = msgspec.msgpack.Decoder(Step)
    while (step := link.receive(steps)) is not None:
        link.send(loader.load(step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
