"""Lines of a round that the coordinator asks for: some of what nodes reduce is reduced a second time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from node.exchange.trouble import Kind, Trouble
from protos.atoll_pb2 import Retally
from protos.buckets import LINE_BYTES, BucketTable

MAX_LINES: Final = 256  # in one question: an answer is a message on the session


def check_lines(order: Retally, table: BucketTable) -> None:
    """Raises Trouble of kind PROTOCOL unless the lines lie in contributions and results of ``table``."""
    count = len(order.lines)
    if not 0 < count <= MAX_LINES or len(order.out_lines) != count:
        what = f"{count} lines of contributions and {len(order.out_lines)} of the result"
    elif (
        max(order.lines) * LINE_BYTES >= table.nbytes
        or max(order.out_lines) * LINE_BYTES >= table.result_nbytes
    ):
        what = f"lines up to {max(order.lines)} of contributions and {max(order.out_lines)} of the result"
    else:
        return
    raise Trouble(
        Kind.PROTOCOL,
        f"the coordinator asks for {what} of round {order.round + 1}, which has no such lines; install the "
        "same version of Atoll on the coordinator and on all nodes",
    )


def lines_of(data: memoryview, lines: Iterable[int]) -> bytes:
    """Those lines of a contribution or a result, end to end."""
    return b"".join(data[LINE_BYTES * line : LINE_BYTES * (line + 1)] for line in lines)
