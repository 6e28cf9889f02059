"""Tests that find noise that repeats in other elements, parameters, steps, runs and processes.

Three kinds of repeats cannot be found. The first is noise that repeats only after the last step.
The second is 16-bit noise whose elements repeat in another order. The third is noise in which only
a few elements are sums of other elements. `repeated_values` finds only equal values, and a
correlation of so few elements is not unlikely enough to fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpbench.verify.noise_bounds import (
    Comparison,
    Comparisons,
    log_chance_of_correlation,
    log_chance_of_count,
)
from dpbench.verify.noise_draw import Draw, joined_noise, sorted_values

PAIR_ELEMENTS = 4096
"""Largest number of leading elements of each parameter that `pair_correlations` compares."""

PAIR_ROWS = 4096
"""Largest number of parameters, each counted in every step, that `pair_correlations` compares."""

STEP_ELEMENTS = 2**20
"""Largest number of leading elements of a whole step that `pair_correlations` compares."""

SEQUENCE_ELEMENTS = 2**20
"""Largest number of elements of all steps in a row that `shift_correlations` searches."""

FEWEST_CORRELATED = 8
"""Smallest number of correlated pairs that `worst_repeat` considers."""

SAME_VALUE = 2**-20
"""Largest relative difference between two float32 roundings of the same drawn value."""
SAME_RANK = 0.484 * SAME_VALUE
"""Largest difference between the ranks of two roundings of the same drawn value. The rank
of x is erf(|x|/√2). The slope of the rank times |x| is at most 0.484, so a relative difference of
`SAME_VALUE` changes the rank by at most 0.484 `SAME_VALUE`."""


def repeated_values(draws: Sequence[Draw]) -> Comparisons:
    """Find values that repeat in any order and with any sign, as tiny gaps between sorted ranks."""
    names = dict.fromkeys(name for draw in draws for name in ("", *draw.noise))
    groups = [(name, draws, "") for name in names]
    groups += [("", [draw], f" in {draw.step_name}") for draw in draws]
    found = []
    for name, group, where in groups:
        ranks = torch.erf(sorted_values(joined_noise(group, name).abs()) / 2**0.5)
        n = len(ranks) - 1
        if n > 0:
            close = int((ranks.diff() <= SAME_RANK).sum())
            chance = log_chance_of_count(close, n, 0.0, min(1.02 * (n + 1) * SAME_RANK, 1.0))
            message = f"{close} of {n + 1} values repeat{where}, in another place or step"
            found.append(Comparison(chance, name, message, f"{close} of {n + 1} values repeat"))
    return found, len(found)


def shift_correlations(draws: Sequence[Draw]) -> Comparisons:
    """Correlate noise with shifted and mirrored copies of the same noise.

    The noise of each run's first step is correlated with its own copies, and so is the sequence of
    the noise of all steps. In the first step of the first run, each parameter is also correlated
    alone, so that a fault in a single parameter is easier to find.
    """
    firsts = [*{draw.run: draw for draw in reversed(draws)}.values()][::-1]
    pieces = [(n, each.double(), d.step_name) for d in firsts[:1] for n, each in d.noise.items()]
    pieces += [("", joined_noise([draw], ""), draw.step_name) for draw in firsts]
    if draws:
        pieces.append(("", joined_noise(draws, "")[:SEQUENCE_ELEMENTS], "all steps in a row"))
    found = []
    for name, piece, where in pieces:
        for repeat, r, n in worst_repeat(piece):
            chance = float(log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
            size = f"r = {r:.2g} of {n}"
            message = f"the noise repeats {repeat} in {where} (correlation {r:.2g} of {n} pairs)"
            found.append(Comparison(chance, name, message, size))
    return found, 4 * sum(len(piece) for _, piece, _ in pieces)


def worst_repeat(noise: Tensor) -> Iterator[tuple[str, float, int]]:
    """Find the least likely correlations of a vector with a shifted copy and with a mirrored copy.

    Fourier transforms give the correlations at all shifts. The bound on the probability needs pairs
    that share no element. At a shift of L, the pairs are (i, i + L). So the vector is cut into
    stretches of L elements. Pairs whose i is in an odd stretch are correlated separately from pairs
    whose i is in an even stretch.

    Yields:
        A description of the repeat, the correlation, and the number of correlated pairs. Nothing
        is yielded for a short vector, or for values that are not finite.
    """
    size = len(noise)
    if size < 2 * FEWEST_CORRELATED or not noise.isfinite().all():
        return
    squares = torch.cat([noise.new_zeros(1), noise.square().cumsum(0)])
    unit = 2 ** ((2 * size - 1).bit_length() - 3)  # a transform's length has only small factors
    spectrum = torch.fft.rfft(noise, -(-(2 * size - 1) // unit) * unit)
    first = torch.arange(size, device=noise.device)

    def least_likely(products: Tensor, a: Tensor, b: Tensor, n: Tensor) -> int:
        """Return the index of the least likely correlation.

        Each correlation is between two stretches of n elements, which begin at a and at b.
        """
        energy = (squares[a + n] - squares[a]) * (squares[b + n] - squares[b])
        squared = products.square_().div_(energy.clamp_(min=1e-300)).mul_(n >= FEWEST_CORRELATED)
        return int(squared.clamp_(max=1 - 1e-12).neg_().log1p_().mul_(n - 1).argmin())

    shifted = torch.fft.irfft(spectrum.abs().square())[:size]
    shifted[0] = 0
    shift = least_likely(shifted, first, torch.zeros_like(first), size - first)
    if shift:
        one, other = noise[:-shift], noise[shift:]
        odd = first[: len(one)] // shift % 2 == 1
        for some in (odd, ~odd):
            yield f"after {shift} elements", *_correlation(one[some], other[some])
    total = torch.arange(2 * size - 1, device=noise.device)  # i + j of a mirrored pair (i, j)
    mirrored = torch.fft.irfft(spectrum.square())[: len(total)]
    middle = (total % 2 == 0) * noise[total // 2].square()
    begin = (total - size + 1).clamp(min=0)
    n = (total + 1) // 2 - begin
    at = least_likely((mirrored - middle) / 2, begin, total - begin - n + 1, n)
    start, length = int(begin[at]), int(n[at])
    other = noise[at - start - length + 1 : at - start + 1].flip(0)
    yield f"mirrored around element {at / 2:g}", *_correlation(noise[start : start + length], other)


def _correlation(a: Tensor, b: Tensor) -> tuple[float, int]:
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0, a.numel()


def pair_correlations(draws: Sequence[Draw]) -> Comparisons:
    """Correlate each parameter's noise with the noise of other parameters and other steps.

    Also correlate the joint noise of all parameters between steps. With so many elements, even a
    small correlation is visible, for example if a trainer of correlated noise leaves out a weight.
    """
    parts = [
        (name, d.step_name, each[:PAIR_ELEMENTS]) for d in draws for name, each in d.noise.items()
    ]
    steps = [("", d.step_name, joined_noise([d], "")[:STEP_ELEMENTS]) for d in draws]
    found, number = _correlations(parts[:PAIR_ROWS])
    more, other_number = _correlations(steps)
    return found + more, number + other_number


def _correlations(named: Sequence[tuple[str, str, Tensor]]) -> Comparisons:
    """Find, for each vector, the earlier vector with the least likely correlation.

    Each entry of ``named`` contains the name of a parameter, the name of a step and a vector.
    """
    if not named:
        return [], 0
    rows = pad_sequence([noise.double() for *_, noise in named], batch_first=True)
    sizes = torch.tensor([len(noise) for *_, noise in named], device=rows.device)
    present = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).to(rows.dtype)
    squares = rows.square() @ present.T  # [i, j]: squares of row i up to the length of row j
    r = (rows @ rows.T / (squares * squares.T).sqrt()).nan_to_num().tril(-1)
    n = torch.minimum(sizes[:, None], sizes)
    worst, others = log_chance_of_correlation(r, n).min(1)
    found = []
    for i, j in enumerate(others.tolist()):
        (name, where, _), (other, other_step, _) = named[i], named[j]
        which = "that" if other == name else f"that of {other}"
        size = f"r = {float(r[i, j]):.2g} of {int(n[i, j])}"
        message = f"its noise in {where} correlates with {which} in {other_step} ({size})"
        found.append(Comparison(float(worst[i]), name, message, size))
    return found, len(named) ** 2 // 2
