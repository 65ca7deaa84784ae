"""The token ledger: a tree of model calls with the ids that the engine saw and emitted.

`Ledger.prepare` says how to ask, `Ledger.record` keeps what was answered, `Ledger.rows` is what is
trained. A pure core: it knows no bus, no store and no clock.
"""

from tailrace.ledger.errors import UnknownCompletionError
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.prompt import Prompt

__all__ = ["Ledger", "Prompt", "UnknownCompletionError"]
