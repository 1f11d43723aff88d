"""What a relay has done, for the last line it prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from outrider.lifecycle import WAITING
from outrider.observer import Buried, Fact, Passed
from outrider.store import Desk


@dataclass(slots=True)
class Tally:
    """Counts what was confirmed and what was buried. `waiting` is known only to who asked the store in the end.

    >>> str(Tally(confirmed=1, buried=2, waiting=0))
    '1 event confirmed, 2 buried; see: outrider dead ls'
    """

    confirmed: int = 0
    buried: int = 0
    waiting: int | None = None

    def notice(self, fact: Fact) -> None:
        """Add up passes and burials."""
        if isinstance(fact, Passed):
            self.confirmed += fact.confirmed
        elif isinstance(fact, Buried):
            self.buried += 1

    async def ask(self, desk: Desk) -> None:
        """Count what stays behind: for another attempt, for its time, or behind the head of its stream.

        What is pending has come after the outbox was found empty, and is the next relay's.
        """
        counts = await desk.counts(sent=False)
        self.waiting = sum(counts.get(state, 0) for state in WAITING)

    @property
    def unfinished(self) -> bool:
        """Tell whether not everything was delivered."""
        return bool(self.buried or self.waiting)

    def facts(self) -> dict[str, int]:
        """Return the counts for programs."""
        return {name: count for name, count in asdict(self).items() if count is not None}

    def __str__(self) -> str:
        parts = [f"{self.confirmed} event{'' if self.confirmed == 1 else 's'} confirmed"]
        parts += [f"{self.buried} buried"] if self.buried else []
        parts += [f"{self.waiting} waiting"] if self.waiting else []
        looks = ["outrider dead ls"] if self.buried else []
        looks += ["outrider events ls"] if self.waiting else []
        return ", ".join(parts) + (f"; see: {', '.join(looks)}" if looks else "")
