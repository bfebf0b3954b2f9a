"""Lines about the division of experts: the plan's, and the predicted steps of others."""

from collections.abc import Mapping, Sequence

from terrace.base.words import counted
from terrace.plan.plan import EXPERT_CHUNKS, Plan
from terrace.planner.expert_tiers import Alternative
from terrace.planner.task import expert_words
from terrace.report.tables import seconds
from terrace.simulate.step import Prediction


def experts_words(plan: Plan) -> str:
    """The ranks that divide experts and the chunks in which tokens go to them, in a line."""
    forward, backward, ahead = (plan.expert_chunks.get(name, 1) for name in EXPERT_CHUNKS)
    chunks = f"{counted(forward, 'chunk')} in a forward and {backward} in a backward"
    chunks += f", {ahead} of them ahead" if ahead > 1 else ""
    return f"experts on {expert_words(plan.experts)}; tokens go to them in {chunks}"


def alternatives_words(base: Prediction, found: Sequence[Alternative]) -> str:
    """The step under each alternative, a line each."""
    lines = []
    for each in found:
        if each.prediction is None:
            lines.append(f"{each.what}: {each.reason}")
            continue
        longer = each.prediction.step_s / base.step_s - 1
        why = _grown(base.times_s[base.busiest], each.prediction.times_s[each.prediction.busiest])
        of_it = f", by {why}" if longer > 0 and why else ""
        lines.append(f"{each.what} the step would take {seconds(each.prediction.step_s)}, {100 * longer:+.1f} %{of_it}")
    return "\n".join(lines)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    # The two categories that grow most; smaller ones than a tenth of the first say little.
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    largest = sorted(grown.items(), key=lambda item: -item[1])[:2]
    told = [f"{seconds(value)} of {name}" for name, value in largest if value > 0.1 * largest[0][1] > 0]
    return " and ".join(told)
