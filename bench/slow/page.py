"""The page of the slow link, from the lines of a results file; no torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.claims import Claim, measured, versioned
from bench.lab.job import BF16_BYTES
from bench.slow.contestants import CONTESTANTS, EVERY, FREE, JOB, LINK_BITS_PER_S, SLOW, Entry
from bench.summary import table

NUM_LAST = EVERY  # steps whose mean loss is shown: a cycle
_LINK = list(JOB.tiers)[-1]
OURS = "terrace"
_TORCHFT, _TORCH = ("torchft", "DiLoCo"), ("torch", "")
_GOALS = {  # at least so many times as long a step as ours; package and part of it
    "torchft": (3.0, *_TORCHFT),
    "torchft-fsdp": (3.0, *_TORCHFT),
    "torchft-streaming": (3.0, *_TORCHFT),
    "ddp-bf16": (20.0, *_TORCH),
    "ddp-powersgd": (1.0, *_TORCH),
}
HIDDEN = 1.05  # times the step without a limit
COUNTED, SENT = 0.03, 0.03  # share by which the kernel's bytes may differ from the formula; S a step
_HEADER = ("contestant", "step s", "quartiles", "step s without limit", "times", "MB a step", "S a step", "CPU s")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A contestant: seconds of steps on each kind of links, bytes a step across the slow one, losses of steps in order.

    `counted_bytes` are the kernel's, by launch; `expected_bytes` those of the formula, where there is one.
    """

    entry: Entry
    steps_s: Mapping[str, list[float]]
    rounds_s: Mapping[tuple[str, int], float]  # by links and round
    counted_bytes: list[float]
    expected_bytes: float | None
    num_params: int
    cpu_s: float
    losses: list[float]

    def step_s(self, links: str = SLOW) -> float:
        return statistics.median(self.steps_s[links])

    @property
    def sent_bytes(self) -> float:
        return statistics.median(self.counted_bytes)

    def loss(self, num_steps: int) -> float:
        """Mean loss of the last cycle of this many steps; of the first steps if there are fewer."""
        return statistics.fmean(self.losses[:num_steps][-NUM_LAST:])


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Found]:
    """Contestants that ran on both kinds of links, in their order."""
    found = {}
    for entry in CONTESTANTS:
        own = [each for each in records if each["contestant"] == entry.name and "error" not in each]
        by_links = {links: [each for each in own if each["links"] == links] for links in (SLOW, FREE)}
        if not all(by_links.values()):
            continue
        found[entry.name] = Found(
            entry=entry,
            steps_s={links: [s for each in group for s in each["steps_s"]] for links, group in by_links.items()},
            rounds_s={(each["links"], each["round"]): statistics.median(each["steps_s"]) for each in own},
            counted_bytes=[each["sent_bytes"][_LINK] for each in by_links[SLOW]],
            expected_bytes=(by_links[SLOW][0].get("expected_bytes") or {}).get(_LINK),
            num_params=own[0]["num_params"],
            cpu_s=statistics.median(each["cpu_s"] for each in by_links[FREE]),
            losses=max((each["losses"] for each in by_links[FREE]), key=len),
        )
    return found


def claims(found: Mapping[str, Found]) -> list[Claim]:
    """Ours against each rival on the slow link, and against itself without a limit; none where ours did not run."""
    if OURS not in found:
        return []
    ours, made = found[OURS].rounds_s, list[Claim]()
    for name, (goal, package, part) in _GOALS.items():
        theirs = found[name].rounds_s if name in found else {}
        ratios = [theirs[key] / ours[key] for key in ours if key[0] == SLOW and key in theirs]
        if ratios:
            words = f"one slow link: times as fast a step as {found[name].entry.label}"
            bound = f"a step without a limit takes {found[OURS].step_s(FREE):.2f} s of computing on these cores"
            made.append(measured(words, ratios, goal, at_least=True, rival=versioned(package, part), bound=bound))
    ratios = [
        ours[SLOW, number] / ours[FREE, number] for links, number in ours if links == SLOW and (FREE, number) in ours
    ]
    made.append(measured("one slow link: step over that without a limit", ratios, HIDDEN, bound="load of the machine"))
    return [*made, *_of_bytes(found[OURS])]


def _of_bytes(ours: Found) -> list[Claim]:
    copies = [sent / ours.num_params / BF16_BYTES for sent in ours.counted_bytes]
    made = [measured("one slow link: bytes a step between nodes", copies, SENT, unit="S")]
    if ours.expected_bytes:
        apart = [abs(sent / ours.expected_bytes - 1) for sent in ours.counted_bytes]
        words = "one slow link: share by which the kernel counts other bytes than the formula of a cycle"
        made.append(measured(words, apart, COUNTED, bound="headers of frames"))
    return made


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page in Markdown."""
    found = summarise(records)
    failed = {each["contestant"]: str(each["error"]) for each in records if "error" in each}
    parts = [
        "# Training across one slow link",
        _method(records),
        *_verdicts(claims(found)),
        "## Steps and bytes",
        table(_HEADER, [_row(each) for each in found.values()]),
        "## Loss at equal tokens, and at equal seconds",
        *_losses(list(found.values())),
    ]
    missing = [f"- {name}: {error}" for name, error in failed.items() if name not in found]
    if missing:
        parts += ["## Did not run", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def _method(records: Sequence[Mapping[str, Any]]) -> str:
    first, loads = records[0], [each["load"] for each in records]
    ranks = " x ".join(map(str, reversed([*JOB.tiers.values()])))
    model = f"{JOB.layers} layers, hidden {JOB.hidden}, one sequence of {JOB.sequence} bytes a rank and step"
    machine = f"{first['processor']}, {first['cores']} cores, torch {first['torch']}, torchft {first['torchft']}"
    limit = f"{LINK_BITS_PER_S / 1e6:g} Mbit/s"
    job = (
        f"`make bench-slow` writes this page. {JOB.world_size} gloo ranks, {ranks} (nodes, packages, ranks), on",
        f"emulated links of the preset `lab`, with a node's link into the system at {limit}, or without a limit.",
        f"Llama-style decoder, {model}, of the standard library's source;",
        "fp32, fused AdamW, gradients clipped at norm 1. Same values, same sequences in each step for all. Who takes",
        f"local steps exchanges every {EVERY}, between the nodes; inside a node every step is synchronous.",
    )
    measures = (
        "A step is the mean of a span between two barriers, on the slowest rank: a whole cycle of local steps, some",
        "steps of the others. Bytes are the kernel's counters on the slow link, of all ranks; S is",
        f"{BF16_BYTES} bytes a parameter. CPU seconds are those of all ranks a step. {machine};",
        f"load average before a launch {min(loads):.1f} to {max(loads):.1f}.",
    )
    return "\n".join((*job, "", *measures))


def _verdicts(made: Sequence[Claim]) -> list[str]:
    rows = [(each.name, each.found_words, each.goal_words, "met" if each.is_met else "**missed**") for each in made]
    return ["## Goals", table(("claim", "found", "goal", ""), rows)] if rows else []


def _row(found: Found) -> tuple[str, ...]:
    slow_s = sorted(found.steps_s[SLOW])
    claim = measured("", slow_s, 0.0)
    return (
        found.entry.label,
        f"{found.step_s():.3f}",
        f"{claim.low:.3f} - {claim.high:.3f} ({len(slow_s)})",
        f"{found.step_s(FREE):.3f}",
        f"{found.step_s() / found.step_s(FREE):.2f}",
        f"{found.sent_bytes / 1e6:.3f}",
        f"{found.sent_bytes / found.num_params / BF16_BYTES:.3f}",
        f"{found.cpu_s:.2f}",
    )


def _losses(found: Sequence[Found]) -> list[str]:
    if not found:
        return ["Nobody ran on both kinds of links."]
    num_steps = min(len(each.losses) for each in found)
    # As long as the fastest takes for these steps on the slow link; nobody else gets further.
    seconds = num_steps * min(each.step_s() for each in found)
    rows = []
    for each in found:
        reached = min(num_steps, int(seconds / each.step_s()))
        then = f"{each.loss(reached):.4f}" if reached >= NUM_LAST else "-"
        rows.append((each.entry.label, f"{each.loss(num_steps):.4f}", str(reached), then))
    header = ("contestant", f"loss after {num_steps} steps", f"steps in {seconds:.0f} s of the slow link", "loss then")
    return [
        table(header, rows),
        f"A loss is the mean over all ranks and {NUM_LAST} steps, each rank's of the parameters it trains with; - where"
        "\nfewer steps were taken. One seed.",
    ]
