"""Wire formats that a user allows, and the search that uses them where they make the predicted step shorter.

A search prices the formats of its task and chooses none, since rounding changes the training itself. With formats
allowed (`--allow`, or `--allow-rounding` for all classes) there are two searches: without them, and with the narrowest
format of each message class and tier that shortens a message (`shortens`). Where the second finds the faster plan,
each class and tier of that plan then takes the widest format that does not make the step longer (`_widened`). Formats
of exchanges between islands are chosen with their cycle (terrace.planner.loops).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.plan.edges import edge_coding_bytes
from terrace.plan.hops import Hop
from terrace.plan.plan import Plan
from terrace.plan.search_limits import FINALISTS
from terrace.plan.wire import (
    CHANGES,
    FORMATS,
    OF_PARAMETERS,
    PACKABLE,
    PLACEABLE,
    MessageClass,
    WireFormat,
    parse_format,
)
from terrace.plan.wire_rules import check_format
from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import TIE, Estimate, ranked
from terrace.planner.search import Found, find
from terrace.planner.space import Space
from terrace.planner.task import Candidate, Task, Wire
from terrace.simulate.links import coding_s, rate_bytes_per_s

_NUMEL = 1 << 20  # of a large message: a format that does not shorten it shortens none
_ROUNDS = 3  # of formats chosen for a plan, and of plans ranked with them


@dataclass(frozen=True)
class Choice:
    """Formats of a message class on a tier, widest first, including the `default` that applies if none is given.

    Formats in `useless` make a message slower: coding costs more than the saved bytes.
    """

    default: str
    formats: tuple[str, ...]
    useless: tuple[str, ...] = ()


Place = tuple[str, str]  # message class, tier
Allowed = Mapping[Place, Choice]


def parse_allowed(texts: Iterable[str], task: Task, *, islands: bool) -> Allowed:
    """Parse `CLASS=FORMAT` and `CLASS.TIER=FORMAT`, and `packed`, which stands for every class that it does not round.

    `task` is of the whole cluster; with `islands`, the outermost tier's members are islands. Raises `PlanError` for a
    format without any effect.
    """
    plan = Plan(
        params="device",
        grads="device",
        optimizer="device",
        compute=task.compute,
        messages=task.messages,
        master=task.master,
    )
    asked: dict[Place, list[WireFormat]] = {}
    spelled = (_packed(text, task, islands) if _is_packed(text) else [text] for text in texts)
    for text in chain.from_iterable(spelled):
        message, tiers, name = _parsed(text, task.cluster, islands)
        default = plan.wire_format(message, tiers[0])
        for tier in tiers:
            try:
                check_format(plan, message, tier, name)
            except PlanError as error:
                raise PlanError(f"--allow {text}: {error}") from error
            asked.setdefault((message.value, tier), []).append(parse_format(name))
        if name == default.name:
            raise PlanError(f"--allow {text} has no effect: {message.value} travels in {default.name} anyway")
        # The change of an island is kept, and may be sent, in the dtype of sums.
        if message is not MessageClass.OUTER and _width(parse_format(name)) < _width(default):
            raise PlanError(
                f"--allow {text}: {message.value} travels in {default.name}, which is narrower: allow a format that "
                "shortens messages, or set it in the plan's table wire"
            )
    return {place: _choice(task, plan, MessageClass(place[0]), place[1], each) for place, each in asked.items()}


def _is_packed(text: str) -> bool:
    # Without a class: it rounds nothing, so nobody needs to choose.
    return re.fullmatch(r"\s*packed([:+].*)?", text) is not None


def _packed(text: str, task: Task, islands: bool) -> list[str]:
    try:
        bits = parse_format(text.strip()).mantissa_bits
    except PlanError as error:
        raise PlanError(f"--allow {text}: {error}") from error
    # Parameters travel in `messages` if that is set, activations as they are computed.
    of = {
        message: task.compute if message not in OF_PARAMETERS else task.messages or task.compute for message in PACKABLE
    }
    exact = [message for message in PACKABLE if FORMATS[of[message]].mantissa_bits <= bits]
    if not exact:
        raise PlanError(
            f"--allow {text}: packed has the bits of bf16, and messages are {task.compute}, which it would round; "
            f"compute in bf16, or name the classes that may be rounded, such as --allow gather={text.strip()}"
        )
    found = _of_classes(exact, text.strip(), task, islands)
    if not found:
        raise PlanError(f"--allow {text} has no effect: {_why_none(task)}; leave it out")
    return found


def of_every_class(text: str, task: Task, *, islands: bool) -> list[str]:
    """Expand a format of `--allow-rounding` into texts for `parse_allowed`, one per message class that it can shorten.

    Raises `PlanError` for a format that does not exist, and for one that shortens no message.
    """
    try:
        parse_format(text)
    except PlanError as error:
        raise PlanError(f"--allow-rounding {text}: {error}") from error
    found = _of_classes(PLACEABLE, text, task, islands)
    if not found:
        raise PlanError(
            f"--allow-rounding {text} has no effect: {_why_none(task)}; leave it out, or give one such as int8"
        )
    return found


def _of_classes(messages: Iterable[MessageClass], text: str, task: Task, islands: bool) -> list[str]:
    found = list[str]()
    for message in messages:
        each = f"{message.value}={text}"
        with suppress(
            PlanError
        ):  # by the rules of one class: a sparse format is for gradients, a class may be as narrow
            parse_allowed([each], task, islands=islands)
            found.append(each)
    return found


def _why_none(task: Task) -> str:
    return "there are no messages" if task.cluster.world_size == 1 else "messages are as narrow without it"


def _choice(task: Task, plan: Plan, message: MessageClass, tier: str, asked: Sequence[WireFormat]) -> Choice:
    default = plan.wire_format(message, tier)
    held = task.sums if message in CHANGES else task.compute
    taken, useless = [default], list[str]()
    for wire in dict.fromkeys(asked):
        if _width(wire) < _width(default) or shortens(task.cluster, tier, default, wire, held):
            taken.append(wire)
        else:
            useless.append(wire.name)
    return Choice(default.name, tuple(wire.name for wire in sorted(taken, key=_width)), tuple(useless))


def _parsed(text: str, cluster: Cluster, islands: bool) -> tuple[MessageClass, list[str], str]:
    match = re.fullmatch(r"\s*([\w-]+)(?:\.([\w-]+))?\s*=\s*(\S+)\s*", text)
    if match is None:
        raise PlanError(f"--allow {text!r}: write CLASS=FORMAT or CLASS.TIER=FORMAT, such as sync=int8")
    word, tier, name = match.groups()
    classes = [message.value for message in PLACEABLE]
    if word not in classes:
        # Include formats of states, which are parsed elsewhere: any of these may be meant.
        hint = did_you_mean(word, [*classes, "master", "optimizer_states"])
        raise PlanError(f"--allow {text!r} names {word!r}, which is no message class or state{hint}")
    message = MessageClass(word)
    if message is MessageClass.OUTER and not islands:
        raise PlanError(f"--allow {text} has no effect: all ranks are one island; give --outer, or leave it out")
    sizes = {each.name: each.size for each in cluster.tiers}
    if tier is not None and tier not in sizes:
        raise PlanError(f"--allow {text!r} names tier {tier!r}{did_you_mean(tier, sizes)}")
    if islands and message is not MessageClass.OUTER:
        sizes[cluster.tiers[-1].name] = 1  # nothing else crosses it
    tiers = [each for each, size in sizes.items() if size > 1 and tier in (None, each)]
    if not tiers:
        where = "any tier" if tier is None else f"tier {tier!r}"
        raise PlanError(f"--allow {text} has no effect: no {word} message crosses {where}; leave it out")
    return message, tiers, name


def shortens(cluster: Cluster, tier: str, default: WireFormat, wire: WireFormat, held: str) -> bool:
    """Whether a format shortens a message over a tier: n/beta - n/(ratio beta) > coding + decoding.

    The message has n bytes in the format `default`, the tier has rate beta; values have the dtype `held`.
    """
    index = cluster.index(tier)
    saved = default.message_bytes(_NUMEL) - wire.message_bytes(_NUMEL)
    coded_s = coding_s(cluster, edge_coding_bytes(held, Hop(index, 2, wire, _NUMEL)))
    return saved / rate_bytes_per_s(cluster, index, 0) > coded_s


def _width(wire: WireFormat) -> tuple[int, int, bool]:
    # Widest first; among equally wide ones, the more precise first.
    return -wire.message_bytes(_NUMEL), -wire.mantissa_bits, not wire.feedback


class Searched(NamedTuple):
    """Result of a search, with the space whose task has the formats of the first plan.

    `plain_s`: the step of the best plan without any allowed format.
    """

    space: Space
    found: Found
    evaluator: Evaluator
    plain_s: float


def find_allowed(space: Space, allowed: Allowed, count: int, limit: int) -> Searched:
    """`find` with formats where they make the step shorter, except those of exchanges between islands."""
    found, evaluator = find(space, count, limit)
    plain = Searched(space, found, evaluator, found.best[0].step_s if found.best else math.inf)
    own = {place: choice for place, choice in allowed.items() if place[0] != MessageClass.OUTER.value}
    narrow = _wire({place: choice.formats[-1] for place, choice in own.items()}, own)
    if not narrow:
        return plain
    coded, _ = find(_with_wire(space, narrow), count, limit)
    if not coded.best:
        return plain
    wire, best = _settled(space.task, own, narrow, [each.candidate for each in coded.best])
    if best[0].step_s >= (1 - TIE) * plain.plain_s:
        return plain
    chosen = _with_wire(space, wire)
    return Searched(chosen, replace(coded, best=tuple(best)), Evaluator(chosen.task), plain.plain_s)


def _settled(task: Task, allowed: Allowed, wire: Wire, candidates: Sequence[Candidate]) -> tuple[Wire, list[Estimate]]:
    """The widest formats for the best of some candidates that fit with `wire`, and the estimates, best first.

    Only finalists are considered, so the result does not depend on the number of requested candidates.
    """
    first, best, further = candidates[0], list[Estimate](), candidates[FINALISTS:]
    for _ in range(_ROUNDS):
        wire = _widened(task, allowed, wire, first)
        evaluator = Evaluator(replace(task, wire=wire))
        best = ranked(filter(None, (_priced(evaluator, each) for each in candidates[:FINALISTS])))
        # With wider formats another candidate may become the best; then formats are widened for that one.
        if best[0].candidate == first:
            break
        first = best[0].candidate
    evaluator = Evaluator(replace(task, wire=wire))
    return wire, [*best, *ranked(filter(None, (_priced(evaluator, each) for each in further)))]


def _widened(task: Task, allowed: Allowed, wire: Wire, candidate: Candidate) -> Wire:
    """The widest format of each class and tier that leaves the step of a candidate practically unchanged."""
    chosen = {
        (message, tier): wire.get(message, {}).get(tier, choice.default) for (message, tier), choice in allowed.items()
    }
    for _ in range(_ROUNDS):
        before = dict(chosen)
        for place, choice in allowed.items():
            tried: list[tuple[str, float]] = []
            for name in choice.formats:
                changed = replace(task, wire=_wire(chosen | {place: name}, allowed))
                found = _priced(Evaluator(changed), candidate)
                if found is not None:
                    tried.append((name, found.step_s))
            least_s = min((step_s for _, step_s in tried), default=0.0)
            # They are in order of width.
            chosen[place] = next((name for name, step_s in tried if step_s <= (1 + TIE) * least_s), chosen[place])
        if chosen == before:
            break
    return _wire(chosen, allowed)


def _wire(chosen: Mapping[Place, str], allowed: Allowed) -> Wire:
    found: dict[str, dict[str, str]] = {}
    for (message, tier), name in chosen.items():
        if name != allowed[message, tier].default:
            found.setdefault(message, {})[tier] = name
    return found


def _with_wire(space: Space, wire: Wire) -> Space:
    return replace(space, task=replace(space.task, wire=wire))


def _priced(evaluator: Evaluator, candidate: Candidate) -> Estimate | None:
    """The estimate of a candidate; None if it breaks a rule or does not fit."""
    try:
        found = evaluator.played(candidate)
    except PlanError:
        return None
    return found if found.needed_bytes <= evaluator.task.cluster.device.usable_bytes else None
