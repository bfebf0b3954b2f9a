"""Text about experts and tables on several ranks: the plan's division, and the predicted steps of alternatives."""

from collections.abc import Iterator, Mapping

from terrace.base.words import counted, longer, seconds
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.plan import EXPERT_CHUNKS, Plan
from terrace.plan.tables import TableTraffic
from terrace.plan.wire import MessageClass
from terrace.planner.advice import expert_changes
from terrace.planner.divisions import table_words
from terrace.program.block_program.steps import Await, Compute, ComputeKind, Gap, Steps
from terrace.program.instruction import Op
from terrace.program.program import Program
from terrace.report.inside import tiers_words
from terrace.report.table import Table
from terrace.simulate.inside import InBlockPrices, block_prices
from terrace.simulate.step import Prediction

_WHOLE = (ComputeKind.SHARED, ComputeKind.SHARED_GRADIENTS)  # not divided into chunks of tokens


def division_words(plan: Plan) -> str:
    """One line: the ranks that divide experts, and the chunks in which tokens are sent; "" if experts are whole."""
    if not plan.experts:
        return ""
    forward, backward, ahead = (plan.expert_chunks.get(name, 1) for name in EXPERT_CHUNKS)
    chunks = f"{counted(forward, 'chunk')} in a forward and {backward} in a backward"
    chunks += f", {ahead} of them ahead" if ahead > 1 else ""
    return f"experts on {table_words(plan.experts)}; tokens go to them in {chunks}"


def routed_table(program: Program) -> Table:
    """The steps of routed blocks for one micro-batch: computations, and messages with mean bytes and seconds.

    Empty if no block has experts, or a table, on several ranks.
    """
    headings, routed = ("block", "", "step", "a rank sends", "takes"), program.model.routed
    kinds = [words for words, found in (("experts", routed.of_experts), ("rows of tables", routed.of_tables)) if found]
    title = f"{' and '.join(kinds)} on several ranks, for every micro-batch"
    table = Table(title=title, headings=headings, left=headings[:-1])
    # Blocks with equal steps share rows.
    alike: dict[tuple[ExpertTraffic | TableTraffic, bool], list[int]] = {}
    for index in range(len(program.blocks)):
        if any(program.model.block_program(index).routed):
            alike.setdefault((routed.sizes(index), program.model.recomputes(index)), []).append(index)
    for first, *others in alike.values():
        name = program.blocks[first].name + (f" (x {len(others) + 1})" if others else "")
        prices = block_prices(program, first)
        for op in (Op.FORWARD, Op.BACKWARD):
            table.add_section()
            for words in _routed_rows(program, prices, first, program.model.block_program(first).routed_steps(op)):
                table.add_row(name, op.value.lower(), *words)
                name = ""
    return table


def _routed_rows(program: Program, prices: InBlockPrices, block: int, steps: Steps) -> Iterator[tuple[str, str, str]]:
    last = ""
    for step in steps:
        if isinstance(step, Gap):
            shares = program.plan.gap_shares[step.number : step.number + 1]
            yield from ((f"gap: {share:.0%} of the gradients before", "", "") for share in shares if share)
            continue
        if isinstance(step, Compute):
            last = step.kind.value if step.kind in _WHOLE else f"{step.kind.value}, {step.number + 1}"
            yield last, "", ""
            continue
        (message,) = step.send.messages if isinstance(step, Await) else step.messages
        assert isinstance(message, RoutedMessage), "the steps are of experts"
        words = message.message_class.value
        words += "" if message.message_class is MessageClass.ROUTE else f" {message.chunk + 1}"
        if isinstance(step, Await):
            # Waits for several hops of a chunk share a row.
            if last != f"wait for {words}":
                last = f"wait for {words}"
                yield last, "", ""
            continue
        last = words
        yield (
            words,
            tiers_words(program, program.model.message_inside(message, block).sends),
            seconds(prices.seconds(message)),
        )


def mean_words(program: Program) -> str:
    """A note that bytes of routed messages are means; "" without such messages."""
    routed = program.model.routed
    means = ["under even routing"] * bool(routed.of_experts) + ["of uniform ids"] * bool(routed.of_tables)
    return f"route, dispatch and combine: the mean {' and '.join(means)}; each batch declares its own" * bool(means)


def alternatives_words(base: Prediction) -> str:
    """One line for each alternative division of experts, with its predicted step; "" if there is none."""
    lines = []
    for each in expert_changes(base):
        if each.cost is None:
            lines.append(f"with {each.words}: {each.reason}")
            continue
        why = _grown(base.times_s[base.busiest], each.cost.time_s)
        of_it = f", by {why}" if each.step_s > base.step_s and why else ""
        against = longer(each.step_s, base.step_s)
        lines.append(f"with {each.words} the step would take {seconds(each.step_s)}, {against}{of_it}")
    return "\n".join(lines)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    # The two categories that grow most, without the second if it is below a tenth of the first.
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    largest = sorted(grown.items(), key=lambda item: -item[1])[:2]
    told = [f"{seconds(value)} of {name}" for name, value in largest if value > 0.1 * largest[0][1] > 0]
    return " and ".join(told)
