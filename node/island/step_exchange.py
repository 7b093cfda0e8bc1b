"""Divided matrices on their way to the rank that steps them, and back: two collectives a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from node.island.collectives import Collectives
from node.island.routing import Matrix


class Exchange:
    """The divided matrices of one set of ranks and one dtype.

    A rank sends its part of a matrix to the matrix's worker: one element that says whether there is a
    gradient, the weights, and the gradient. The worker sends the new weights back.

    Args:
        matrices: in the same order on all ranks.
        stand_ins: the parameters of those that are stepped here, by name; without memory between steps.
    """

    def __init__(self, matrices: Sequence[Matrix], stand_ins: Mapping[str, nn.Parameter]) -> None:
        self.matrices, self.stand_ins = list(matrices), stand_ins
        self.sent_bytes = 0
        first = self.matrices[0].entry
        self.comm: Collectives = first.comm
        ranks = range(self.comm.ranks)
        self._held = {m.name: [m.held(rank) for rank in ranks] for m in self.matrices}
        self._like = first.parameter

    @staticmethod
    def of(matrices: Sequence[Matrix], stand_ins: Mapping[str, nn.Parameter]) -> list[Exchange]:
        """One for each set of ranks and dtype."""
        kinds: dict[tuple[int, torch.dtype], list[Matrix]] = {}
        for matrix in matrices:
            kinds.setdefault((id(matrix.entry.comm.group), matrix.entry.parameter.dtype), []).append(matrix)
        return [Exchange(members, stand_ins) for members in kinds.values()]

    def _size(self, matrix: Matrix, rank: int) -> int:
        low, high = self._held[matrix.name][rank]
        return high - low

    def _stepped_by(self, rank: int) -> list[Matrix]:
        return [matrix for matrix in self.matrices if matrix.worker == rank]

    @torch.no_grad()
    def bring(self) -> None:
        """Gather weights and gradients: the stand-ins have both afterwards."""
        me, ranks = self.comm.rank, range(self.comm.ranks)
        parts: list[Tensor] = []
        leaving = [0] * len(ranks)
        for worker in ranks:
            for matrix in self._stepped_by(worker):
                if self._size(matrix, me):
                    message = self._outgoing(matrix)
                    parts.append(message)
                    leaving[worker] += message.numel()
        mine = self._stepped_by(me)
        arriving = [sum(1 + 2 * n for n in (self._size(m, rank) for m in mine) if n) for rank in ranks]
        received = self._all_to_all("gather of divided matrices for the step", parts, leaving, arriving)
        for matrix in mine:
            stand_in = self.stand_ins[matrix.name]
            stand_in.untyped_storage().resize_(matrix.numel * stand_in.element_size())
            stand_in.grad = torch.empty_like(stand_in)
        position = 0
        for rank, matrix in ((rank, matrix) for rank in ranks for matrix in mine):
            stand_in, (low, high) = self.stand_ins[matrix.name], self._held[matrix.name][rank]
            inside, size = slice(low - matrix.start, high - matrix.start), high - low
            if not size:
                continue
            message = received[position : position + 1 + 2 * size]
            position += message.numel()
            stand_in.detach().view(-1)[inside].copy_(message[1 : 1 + size])
            if stand_in.grad is not None:
                if message[0] == 0:
                    stand_in.grad = None  # then no rank has one
                else:
                    stand_in.grad.view(-1)[inside].copy_(message[1 + size :])

    def _outgoing(self, matrix: Matrix) -> Tensor:
        low, high = self._held[matrix.name][self.comm.rank]
        piece = matrix.entry.piece
        assert piece is not None
        inside = slice(low - piece.start, high - piece.start)
        parameter = matrix.entry.parameter
        weights = parameter.detach().view(-1)[inside]
        gradient = torch.zeros_like(weights) if parameter.grad is None else parameter.grad.view(-1)[inside]
        flag = weights.new_full((1,), 0.0 if parameter.grad is None else 1.0)
        return torch.cat([flag, weights, gradient])

    @torch.no_grad()
    def send(self) -> None:
        """Give the holders their parts of the new weights, and the stand-ins' memory back."""
        me, ranks = self.comm.rank, range(self.comm.ranks)
        mine, parts = self._stepped_by(me), []
        for rank in ranks:
            for matrix in mine:
                low, high = self._held[matrix.name][rank]
                flat = self.stand_ins[matrix.name].detach().view(-1)
                parts.append(flat[low - matrix.start : high - matrix.start])
        leaving = [sum(self._size(matrix, rank) for matrix in mine) for rank in ranks]
        arriving = [sum(self._size(m, me) for m in self._stepped_by(worker)) for worker in ranks]
        received = self._all_to_all("return of divided matrices after the step", parts, leaving, arriving)
        position = 0
        for worker in ranks:
            for matrix in self._stepped_by(worker):
                low, high = self._held[matrix.name][me]
                if low < high:
                    piece = matrix.entry.piece
                    assert piece is not None
                    target = matrix.entry.parameter.detach().view(-1)
                    inside = slice(low - piece.start, high - piece.start)
                    target[inside].copy_(received[position : position + high - low])
                    position += high - low
        for matrix in mine:
            stand_in = self.stand_ins[matrix.name]
            stand_in.grad = None
            stand_in.untyped_storage().resize_(0)

    def _all_to_all(self, what: str, parts: list[Tensor], leaving: list[int], arriving: list[int]) -> Tensor:
        source = torch.cat(parts) if parts else self._like.detach().new_empty(0)
        target = source.new_empty(sum(arriving))
        self.sent_bytes += (sum(leaving) - leaving[self.comm.rank]) * source.element_size()
        with self.comm.guard(what):
            dist.all_to_all_single(target, source, arriving, leaving, group=self.comm.group)
        return target
