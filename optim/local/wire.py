"""Pseudo-gradients to bytes and back: encoding of contributions, checking and decoding of results."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optim import bits
from optim.codecs import codec_of
from optim.local.inner import F32
from optim.local.layout import Fragment, Unit
from optim.packs import PayloadError
from protos.buckets import Bucket

U8 = NDArray[np.uint8]


class Wire:
    """Reads and writes payloads of the tables of some fragments.

    Attributes:
        encoders: what the encoders of low ranks carry from round to round, by the name of the bucket.
    """

    def __init__(self) -> None:
        self.encoders: dict[str, dict[str, F32]] = {}

    def prepare(self, fragment: Fragment) -> None:
        """Make the states of all encoders exist."""
        for bucket in fragment.lane.buckets:
            if bucket.reduce == "mean":
                self._encoder(bucket)

    def tensors(self) -> dict[str, Tensor]:
        """The states of the encoders as ``optimizer/<bucket>/encoder_<key>``, live."""
        return {
            f"optimizer/{bucket}/encoder_{key}": torch.from_numpy(value)
            for bucket, state in self.encoders.items()
            for key, value in state.items()
        }

    # ------------------------------------------------------------------ contributions

    def write(self, fragment: Fragment, unit: Unit, values: Tensor, round_index: int, out: U8) -> None:
        """Encode a pseudo-gradient (finite fp32 on the host, 1-D) into a contribution."""
        place = fragment.places[unit.name]
        part = out[place.offset : place.offset + unit.bucket.nbytes]
        if not unit.scales:
            self.write_mean(fragment, unit.bucket, values.numpy(), round_index, out)
            return
        bits.pack(values, seed=bits.zero_seed(round_index, place.number), out=torch.from_numpy(part))
        magnitudes = values.abs().view(unit.scales, -1).mean(dim=1, dtype=torch.float64)
        scales = unit.scale_bucket
        assert scales is not None, "a vote has scales"
        self.write_mean(fragment, scales, magnitudes.to(torch.float32).numpy(), round_index, out)

    def write_mean(self, fragment: Fragment, bucket: Bucket, values: F32, round_index: int, out: U8) -> None:
        """Encode the values of a mean bucket; raises ``ValueError`` if they are not finite."""
        place = fragment.places[bucket.name]
        codec = codec_of(bucket.codec, bucket.shape)
        seed = bits.zero_seed(round_index, place.number)
        start, end = place.offset + codec.nbytes, place.offset + bucket.nbytes
        codec.encode(values, out[place.offset : start], seed=seed, state=self._encoder(bucket) or None)
        out[start:end] = 0

    # ------------------------------------------------------------------ results

    def check(self, fragment: Fragment, result: U8, what: str) -> None:
        """Raise :class:`~optim.packs.PayloadError` for a result of which something must not be decoded."""
        for place in fragment.places.values():
            bucket = place.bucket
            if bucket.reduce == "majority":
                continue
            codec = codec_of("fp32" if bucket.reduce == "basis" else bucket.result, bucket.shape)
            part = result[place.result_offset : place.result_offset + codec.nbytes]
            if problem := codec.problem(part):
                raise PayloadError(f"{what} was not applied: bucket {bucket.name!r}: {problem}")

    def read(self, fragment: Fragment, unit: Unit, data: U8, *, result: bool) -> Tensor:
        """What a unit's pseudo-gradient decodes to, in a result or in a contribution: a new fp32 vector, the
        same bits everywhere."""
        place = fragment.places[unit.name]
        if (magnitudes := unit.scale_bucket) is None:
            return torch.from_numpy(self.read_mean(fragment, unit.bucket, data, result=result)).view(-1)
        offset = place.result_offset if result else place.offset
        packed = torch.from_numpy(data[offset : offset + unit.bucket.nbytes])
        values = bits.unpack(packed, unit.bucket.elements).view(unit.scales, -1)
        # a magnitude below zero can only come from a node that lies: it must not turn the others' votes round
        scales = torch.from_numpy(self.read_mean(fragment, magnitudes, data, result=result)).clamp_(min=0.0)
        return values.mul_(scales[:, None]).view(-1)

    def read_mean(self, fragment: Fragment, bucket: Bucket, data: U8, *, result: bool) -> F32:
        """What a mean or a basis decodes to, of the bucket's shape."""
        place = fragment.places[bucket.name]
        name = bucket.codec if not result else "fp32" if bucket.reduce == "basis" else bucket.result
        codec = codec_of(name, bucket.shape)
        offset = place.result_offset if result else place.offset
        return codec.decode(data[offset : offset + codec.nbytes])

    # ------------------------------------------------------------------ details

    def _encoder(self, bucket: Bucket) -> dict[str, F32]:
        if bucket.name not in self.encoders:
            self.encoders[bucket.name] = codec_of(bucket.codec, bucket.shape).state()
        return self.encoders[bucket.name]
