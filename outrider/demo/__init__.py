"""The promise, shown: orders are committed, relays and consumers are killed, and then everything is counted.

SQLite and the embedded broker, so it needs no server. What is counted at the end comes from the tables and the log, not
from what the demo believes it did.
"""

from outrider.demo.run import run

__all__ = ["run"]
