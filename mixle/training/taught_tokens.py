"""Tokens that a teacher made, as a language model is trained on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.training.next_token import IGNORED, TokenTensors

ID_NAMES = ("input_ids", "ids", "inputs", "input", "tokens", "token_ids")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class TaughtTokens:
    """Which tensors of a sample are token ids and their targets; made with :meth:`of`.

    Attributes:
        ids: name of the ids, (T,).
        targets: name of the targets, (T,), ``-100`` where masked; None where each next id is one.
        length: T.
        vocab: what the module's ids are below; None until it is known.
    """

    ids: str
    targets: str | None
    length: int
    vocab: int | None = None

    @classmethod
    def of(cls, config: BatchConfig) -> TaughtTokens:
        """Find them: ids are an integer tensor of one axis, named ``input_ids``, ``ids``, ``inputs``, ``tokens`` or
        the like, else the only one there is; targets one of the same length named with "target" or "label".

        Raises:
            ValueError: there are no ids, or several tensors that could be; or targets of another shape.
        """
        rows = [s for s in config.specs if s.dtype in INTEGERS and len(s.shape) == 1 and s.shape[0] > 1]
        targets = [s for s in config.specs if "target" in s.name.lower() or "label" in s.name.lower()]
        ids = [s for s in rows if s.name.lower() in ID_NAMES] or [s for s in rows if s not in targets]
        if len(ids) != 1:
            listed = ", ".join(f"{s.name} {s.shape} {s.dtype}" for s in config.specs)
            found = "no token ids" if not ids else f"{len(ids)} tensors that may be the token ids"
            raise ValueError(f"the samples have {found} among: {listed}; name an integer tensor of one axis input_ids")
        hard = [s for s in targets if s in rows]
        return cls(ids[0].name, _require_alike(ids[0], hard[0]).name if hard else None, ids[0].shape[0])

    def blank(self, rows: int, device: torch.device) -> TokenTensors:
        """Return ``rows`` rows of zeros, of which every target counts."""
        zeros = torch.zeros((rows, self.length), dtype=torch.int64, device=device)
        return TokenTensors(zeros, zeros)

    def batch(self, tensors: Mapping[str, Tensor], device: torch.device) -> TokenTensors:
        """Return samples on the device; ids of int64 in the host's memory are not copied.

        Raises:
            ValueError: an id that is not of the vocabulary.
        """
        ids = tensors[self.ids].long()
        self._require_known(self.ids, ids, ids)
        if self.targets is not None:
            targets = tensors[self.targets].long()
            self._require_known(self.targets, targets, targets[targets != IGNORED])
        else:
            targets = torch.full_like(ids, IGNORED)
            targets[:, :-1] = ids[:, 1:]
        return TokenTensors(ids.to(device), targets.to(device))

    def places(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many targets these samples have."""
        if self.targets is None:
            return len(tensors[self.ids]) * (self.length - 1)
        return int((tensors[self.targets].long() != IGNORED).sum())

    def _require_known(self, name: str, ids: Tensor, checked: Tensor) -> None:
        if self.vocab is None or not checked.numel():
            return
        low, high = checked.aminmax()
        if low < 0 or high >= self.vocab:
            bad = int(low) if low < 0 else int(high)
            row = int((ids == bad).any(dim=1).nonzero()[0])
            raise ValueError(
                f"the teacher made {name}={bad} in sample {row} of a batch, which is not an id of the module's "
                f"vocabulary of {self.vocab}: an integer in [0, {self.vocab})"
            )


def _require_alike(ids: TensorSpec, targets: TensorSpec) -> TensorSpec:
    if targets.shape != ids.shape:
        raise ValueError(
            f"targets {targets.name!r} have shape {targets.shape}, and the ids {ids.name!r} {ids.shape}; give "
            "each id one"
        )
    return targets
