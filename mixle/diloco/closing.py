"""Close a round: take what its learners published, merge it, and take the outer optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.merge import averaged, clip_factors, mean_cosine, merge_deltas, norm
from mixle.diloco.outer import final_step, nesterov_step, publish
from mixle.diloco.parameters import Arrays
from mixle.diloco.records import Contribution, Rejection, Snapshot
from mixle.diloco.weights import Work, shares

__all__ = ["Closed", "Offer", "close"]


@dataclass(frozen=True)
class Offer:
    """A snapshot and its delta, finite."""

    snapshot: Snapshot
    delta: Arrays


@dataclass(frozen=True)
class Closed:
    """What a round makes of a fragment.

    Attributes:
        theta: the parameters that all sites move to.
        master: the outer optimizer's own, which are ``theta`` itself unless the update is quantized.
        momentum: the outer optimizer's.
        update: ``theta`` minus what it was, where that is quantized.
    """

    theta: Arrays
    master: Arrays
    momentum: Arrays
    update: Arrays | None
    contributions: tuple[Contribution, ...]
    rejections: tuple[Rejection, ...]
    cosine: float | None


def close(
    algorithm: DiLoCo,
    offers: list[Offer],
    *,
    theta: Arrays,
    master: Arrays,
    momentum: Arrays,
    embeddings: frozenset[str],
    quantize: Callable[[Arrays], Arrays] | None,
    buffers: frozenset[str] = frozenset(),
) -> Closed:
    """Return what a round makes of a fragment; its arguments are left alone.

    Snapshots that are all a learner's last are added whole, without momentum: nobody is left to correct a step too far.
    Buffers are statistics, which no optimizer moves: they become the weighted mean of the learners', between their
    least and their greatest, so that no variance is negative; norms and cosines are those of the other parameters.

    Args:
        offers: the accepted snapshots; those of a learner that had nothing to add count for nothing.
        theta, master, momentum: the fragment before.
        embeddings: names that are merged by the mean.
        quantize: rounds an update to the run's format and back; None publishes the parameters themselves. It must
            leave buffers as they are.
        buffers: names of the statistics.
    """
    offers = [offer for offer in sorted(offers, key=lambda offer: offer.snapshot.learner) if offer.snapshot.steps]
    new_master = {name: array.copy() for name, array in master.items()}
    new_momentum = {name: array.copy() for name, array in momentum.items()}
    trained = [{name: delta for name, delta in offer.delta.items() if name not in buffers} for offer in offers]
    norms = [norm(delta) for delta in trained]
    factors = clip_factors(norms, [offer.snapshot.steps for offer in offers])
    weights = shares([Work(offer.snapshot.tokens, offer.snapshot.steps) for offer in offers]) if offers else []
    rejections: tuple[Rejection, ...] = ()
    if offers:
        merged = merge_deltas(algorithm.merge, trained, weights, factors=factors, embeddings=embeddings)
        final = all(offer.snapshot.final for offer in offers)
        _step(algorithm, new_master, new_momentum, merged, final=final)
        for name in buffers & theta.keys():
            new_master[name] = averaged(theta[name], [offer.delta[name] for offer in offers], weights)
        if not _finite(new_master) or not _finite(new_momentum):
            why = "overflow: the outer step is not finite"
            rejections = tuple(Rejection.of(offer.snapshot.learner, why) for offer in offers)
            new_master = {name: array.copy() for name, array in master.items()}
            new_momentum = {name: array.copy() for name, array in momentum.items()}
            offers, trained, norms, factors, weights = [], [], [], [], []
    new_theta, update = new_master, None
    if quantize is not None:
        new_theta, update = _published(theta, new_master, quantize)
    contributions = tuple(
        Contribution(
            offer.snapshot.learner,
            offer.snapshot.payload.digest if offer.snapshot.payload else "0" * 64,
            offer.snapshot.steps,
            offer.snapshot.tokens,
            offer.snapshot.seconds_per_step,
            weight,
            size,
            factor,
            offer.snapshot.final,
        )
        for offer, weight, size, factor in zip(offers, weights, norms, factors, strict=True)
    )
    return Closed(new_theta, new_master, new_momentum, update, contributions, rejections, mean_cosine(trained))


def _step(algorithm: DiLoCo, master: Arrays, momentum: Arrays, merged: Arrays, *, final: bool) -> None:
    for name, delta in merged.items():
        if final:
            final_step(master[name], delta)
        else:
            nesterov_step(
                master[name],
                momentum[name],
                delta,
                outer_lr=algorithm.outer_lr,
                outer_momentum=algorithm.outer_momentum,
            )


def _finite(arrays: Arrays) -> bool:
    return bool(np.isfinite(norm(arrays)))


def _published(theta: Arrays, master: Arrays, quantize: Callable[[Arrays], Arrays]) -> tuple[Arrays, Arrays]:
    new_theta = {name: array.copy() for name, array in theta.items()}
    update = {}
    for name, array in new_theta.items():
        update[name] = publish(array, master[name], lambda change, name=name: quantize({name: change})[name])  # type: ignore[misc]
    return new_theta, update
