"""Which nodes have left the common state: a pure judgement on the digests that they report after a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Judgement:
    """``agreed``: digest of the common state, ``None`` while that is open; ``deviants`` reported another."""

    agreed: str | None
    deviants: tuple[str, ...]
    reason: str


def judge(reports: Mapping[str, str], members: Sequence[str]) -> Judgement:
    """Compare the digests of one round.

    A digest is agreed once more than half of ``members`` (slot order, all that had to report, whether they
    are still there or not) have reported it, or all of them have reported: then the most frequent one, and
    among equally frequent ones that of the lowest slot. Who is left alone must not decide what is right.
    """
    given = {node: reports[node] for node in members if node in reports}
    counts = Counter(given.values())  # keeps slot order, so the first maximum is the lowest slot's
    if not counts:
        return Judgement(None, (), "no digest has been reported")
    best, votes = max(counts.items(), key=lambda item: item[1])
    if 2 * votes <= len(members) and len(given) < len(members):
        return Judgement(None, (), f"{len(given)} of {len(members)} digests, no majority yet")
    deviants = tuple(node for node, digest in given.items() if digest != best)
    if not deviants:
        return Judgement(best, (), f"{votes} of {len(members)} nodes agree")
    others = ", ".join(f"{node} ({given[node]})" for node in deviants)
    return Judgement(best, deviants, f"{votes} of {len(members)} nodes hold {best}, not {others}")
