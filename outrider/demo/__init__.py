"""The demo of the guarantees: commits orders, kills relays and consumers, and counts the effects.

SQLite and the embedded broker serve it, so no server is needed. The counts come from the tables and the log, never from
counters of the demo itself.
"""

from outrider.demo.run import run

__all__ = ["run"]
