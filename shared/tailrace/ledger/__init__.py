"""Token ledger: a tree of model calls with the ids that the engine saw and emitted.

`Ledger.prepare` makes the prompt of a call, `Ledger.record` keeps the answer, `Ledger.rows` exports the
rows to train. The package is pure: it uses no bus, no store and no clock.
"""

from tailrace.ledger.ledger import Ledger
from tailrace.ledger.prompting import Prompt, Rendering
from tailrace.ledger.tree import UnknownCompletionError

__all__ = ["Ledger", "Prompt", "Rendering", "UnknownCompletionError"]
