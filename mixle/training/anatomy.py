"""What a module consists of at one time, so that what was made for it is made anew once it is another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import nn


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A module, its parameters by name, and which of them are to be trained.

    Holding the parameters keeps another one from taking the place in memory, and so the identity, of one replaced.
    """

    module: nn.Module
    parameters: Mapping[str, tuple[nn.Parameter, bool]]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the anatomy that ``module`` has now."""
        return cls(module, {name: (p, p.requires_grad) for name, p in module.named_parameters()})

    def is_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` still has it; looks at no values."""
        if module is not self.module:
            return False
        now = dict(module.named_parameters())
        return now.keys() == self.parameters.keys() and all(
            now[name] is p and p.requires_grad == trained for name, (p, trained) in self.parameters.items()
        )
