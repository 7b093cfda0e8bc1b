"""What the coordinator is told of the ways to this node, and when it is told anew."""

from __future__ import annotations

from typing import Final

from protos import atoll_pb2 as pb

_FIRST: Final = 4  # rounds before the first one: the best of so many transfers waited least for others
_ROUNDS: Final = 8  # between two announcements: each makes a new topology
_CHANGE: Final = 0.25  # of a rate, that is worth one


class Announcement:
    """The node's Endpoint.

    Args:
        endpoint: as it is announced first; a rate that is not 0 there is its user's word and stays.
    """

    def __init__(self, endpoint: pb.Endpoint) -> None:
        self._said = endpoint
        self._fixed = endpoint.uplink > 0, endpoint.downlink > 0
        self._rounds = 0  # since it was said

    @property
    def endpoint(self) -> pb.Endpoint:
        """As it was said last."""
        return self._said

    def after_round(self, uplink: float | None, downlink: float | None) -> pb.Endpoint | None:
        """What is to be said after a round, if anything is.

        Args:
            uplink: as measured, in bytes per second; ``None``: not known.
            downlink: likewise.
        """
        self._rounds += 1
        up = _news(self._said.uplink, uplink, self._fixed[0])
        down = _news(self._said.downlink, downlink, self._fixed[1])
        known = self._said.uplink > 0 or self._said.downlink > 0
        if (up is None and down is None) or self._rounds < (_ROUNDS if known else _FIRST):
            return None
        said = pb.Endpoint()
        said.CopyFrom(self._said)
        if up is not None:
            said.uplink, said.uplink_measured = up, True
        if down is not None:
            said.downlink, said.downlink_measured = down, True
        self._said, self._rounds = said, 0
        return said


def _news(said: float, measured: float | None, fixed: bool) -> float | None:
    if fixed or measured is None or abs(measured - said) <= _CHANGE * said:
        return None
    return measured
