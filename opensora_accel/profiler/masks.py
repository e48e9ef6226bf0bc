"""How evenly the ranks of a ring share the pairs of queries and keys that masks leave.

A ring waits in every block for its busiest rank. Under a causal mask of runs in order the last of four ranks has 7
pairs where the first has 1, and the mean is 4: it has 1.75 times the mean, and the others wait for it for 43 % of the
time that it attends. Dealt out, all have as much. A rank under Ulysses has all pairs, of its heads: it is the mean.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from opensora_accel.profiler.analysis import MaskAnalysis
from opensora_accel.profiler.rank_summary import RankSummary, StepSummary
from opensora_accel.profiler.records import MaskedAttention

# Of a run whose rows differ from step to step each row is a mask.
MAX_MASKS = 20


def masks_of(
    ranks: Sequence[RankSummary], summaries: Sequence[Mapping[int, StepSummary]], counted: Sequence[int]
) -> list[MaskAnalysis]:
    """Every mask of these steps, those first whose busiest rank has most beyond its share."""
    calls: dict[str, list[tuple[int, int, MaskedAttention]]] = defaultdict(list)
    for rank, summary in zip(ranks, summaries, strict=True):
        for number in counted:
            for each in summary[number].masks:
                calls[each.mask].append((rank.run.rank, number, each))
    masks = []
    for mask, of_mask in calls.items():
        busiest, _, most = max(of_mask, key=lambda call: (_of_mean(call[2]), -call[0]))
        masks.append(
            MaskAnalysis(
                mask=mask,
                steps=len({number for _, number, _ in of_mask}),
                calls=statistics.fmean(each.calls for _, _, each in of_mask),
                mean_pairs=statistics.fmean(each.mean_pairs for _, _, each in of_mask),
                imbalance=_of_mean(most),
                busiest_rank=busiest,
            )
        )
    return sorted(masks, key=lambda mask: -(mask.imbalance - 1) * mask.mean_pairs * mask.steps)


def mask_imbalance(summaries: Sequence[Mapping[int, StepSummary]], counted: Sequence[int]) -> float | None:
    """The busiest rank's pairs over the mean of those it shares masks with; the mean over steps. None without masks."""
    worst = []
    for number in counted:
        shares = [pairs_of(summary[number]) for summary in summaries]
        worst += (
            [max(pairs / mean for pairs, mean in shares if mean)] if any(mean for _, mean in shares) else []
        )
    return statistics.fmean(worst) if worst else None


def pairs_of(step: StepSummary) -> tuple[int, float]:
    """A rank's pairs of all masks, and the mean of those that it shares them with."""
    return sum(each.pairs for each in step.masks), sum(each.mean_pairs for each in step.masks)


def _of_mean(each: MaskedAttention) -> float:
    return each.pairs / each.mean_pairs if each.mean_pairs else 1.0
