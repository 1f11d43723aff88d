"""What every store that lends its transactions to other people's code says about them."""

from __future__ import annotations

ENDED = (
    "ended the transaction that it was lent, so that only a part of what belongs together may be committed; leave "
    "commit and rollback to outrider"
)
"""A handler, or a step's function, has committed or rolled back by itself."""
