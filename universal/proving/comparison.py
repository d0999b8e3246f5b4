# SPDX-License-Identifier: MIT
"""Compare the rows of next_steps.csv with those of the same steps, trained again."""

import math
import weakref
from collections.abc import Iterable

from universal.load.collective import say

# By how much a loss may differ from rounding alone, by the dtype of matrix products: as a share of
# the loss, or of 1, if that is more.
ROUNDING = {"float32": 1e-5, "float16": 2e-3}
MOST_ROUNDING = 1e-2  # of bfloat16, and of what is not known
NORM_ROUNDING = 10  # times as much of the gradient norm
LOSS = "the loss"
GRAD_NORM = "the gradient norm"
CAUSES = "docs/troubleshooting.md lists what can differ"
COMPARISONS = weakref.WeakSet()


class Comparison:
    """A comparison, on rank 0, with `rows`: {step: Row as trained before the load}.

    restored: who has restored the state, in words. name: of the checkpoint and the folder above it.
    is_alone: whether no other engine goes on beside this one. draws: of all steps so far, before
    and now. gaps: {a number's name: its largest difference so far}.
    """

    def __init__(self, rows, restored="", name=""):
        self.rows = rows
        self.restored = restored
        self.name = name
        others = [other for other in COMPARISONS if not other.gaps]  # loaded, and not trained yet
        self.is_alone = not others
        for other in others:
            other.is_alone = False
        COMPARISONS.add(self)
        self.draws = ([], [])
        self.gaps = {}

    def differs(self, now):
        """Compare a step. Prints the first number that differs by more than rounding; at the last,
        that none does. Returns whether one does. now: the step's Row.
        """
        before = self.rows[now.step]
        whose = "" if self.is_alone else f"{self.name}: "
        trained = f"trained before on {before.ranks} rank{'s' * (before.ranks > 1)}"
        for draws, row in zip(self.draws, (before, now), strict=True):
            draws.append(row.draws)
        for name, number_before, number, tolerance in pairs_of(
            before, now, self.growth(before, now)
        ):
            gap = abs(number - number_before)
            self.gaps[name] = max(self.gaps.get(name, 0), gap)
            is_of_samples = name in (LOSS, GRAD_NORM)
            is_other = gap > tolerance or not math.isfinite(gap)
            if is_other or is_of_samples and are_same_samples(before, now) is False:
                numbers = f"{name} was {number_before:.7g}, and is {number:.7g}"
                kind, words = "WARNING", f": {CAUSES}"
                if not math.isfinite(number_before):
                    words = ": there is nothing to compare with"
                elif is_of_samples:
                    is_near = gap <= MOST_ROUNDING * max(1, abs(number_before))
                    kind, words = self.explain(before, now, is_near)
                say(f"{kind}: {whose}step {now.step}, {trained}: {numbers}{words}")
                return True
        name = LOSS if LOSS in self.gaps else GRAD_NORM
        if now.step == max(self.rows) and name in self.gaps:
            gap = f"{self.gaps[name]:.1e}".replace("0.0e+00", "0")
            steps = f"steps {min(self.rows)} to {now.step}"
            if len(self.rows) == 1:
                steps = f"step {now.step}"
            on_ranks = f"{trained}, now on {now.ranks}"
            say(f"{whose}{steps}, {on_ranks}: {name} differs by at most {gap}")
        return False

    def growth(self, before, now):
        """Returns the factor by which rounding may have grown: doubled each step from the third on,
        as from the second on weights differ; 1 if nothing was added in another order."""
        same = before.ranks == now.ranks and before.micro_batch == now.micro_batch
        if same and not any(self.gaps.values()):
            return 1
        return 2 ** max(0, now.step - min(self.rows) - 1)

    def explain(self, before, now, is_near):
        """Tell what is known of a difference. Returns: "WARNING", or "NOTE" if it may be right; the
        words. is_near: whether it would be rounding in bfloat16."""
        known = are_same_samples(before, now)
        if known is False:
            return "WARNING", ": other samples than before; derive them from the step"
        words = ", of the same samples" if known else ""
        words += self.restored and f"; {self.restored}"
        words += f": {CAUSES}"
        draws_before, draws = self.draws
        if None not in draws_before and draws != draws_before:
            if before.ranks != now.ranks and any(draws_before) and any(draws):
                words = ": dropout follows the rank: accept it, or seed it by step and micro-batch"
                return "NOTE", words
            words = ": other random numbers were drawn; seed dropout by step and micro-batch"
        if is_near and before.micro_batch != now.micro_batch:
            return "NOTE", ": micro-batches of another size round otherwise, in an autocast or TF32"
        return "WARNING", words


def are_same_samples(before, now):
    """Whether a step has the same samples; None if that is not known."""
    if before.dtype != now.dtype:
        return None
    digests = [(row.digests or "").split() for row in (before, now)]
    pairs = [*zip(*digests, strict=False)]
    if before.micro_batch == now.micro_batch and None not in (before.others, now.others):
        pairs.append((before.others, now.others))
    return all(a == b for a, b in pairs) if pairs else None


def coarsest(dtypes: Iterable[str]) -> str:
    return max(dtypes, key=lambda dtype: ROUNDING.get(dtype, MOST_ROUNDING))


def rounding_of(*rows):
    return max(ROUNDING.get(row.dtype, MOST_ROUNDING) for row in rows)


def pairs_of(before, now, growth):
    """Each number of a step: its name, its values, and how far apart rounding may bring them."""
    for group, rates in enumerate(zip(before.rates, now.rates, strict=False)):
        if None not in rates:  # as the optimizer chooses them
            yield f"the learning rate of group {group}", *rates, 1e-6 * abs(rates[0])
    yield "the loss scale", before.loss_scale, now.loss_scale, 0
    rounding = min(growth * rounding_of(before, now), MOST_ROUNDING)
    if None not in (before.loss, now.loss):
        yield LOSS, before.loss, now.loss, rounding * max(1, abs(before.loss))
    norms = (before.grad_norm, now.grad_norm)
    if None not in norms and norms != (math.inf, math.inf):  # of a step that fp16 has skipped
        tolerance = NORM_ROUNDING * rounding * abs(before.grad_norm)  # -1 after an overflow
        yield GRAD_NORM, before.grad_norm, now.grad_norm, tolerance
