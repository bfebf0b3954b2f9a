"""Islands over time as text: a row for each island, a column for each stretch of time."""

from collections.abc import Callable
from math import inf

from terrace.lab.faults.findings import waits
from terrace.lab.faults.islands import Ran, Seen

Column = Callable[[float], int]
Draw = Callable[[str, float, float], None]

WIDTH = 72
LEGEND = "= trains   . waits or starts   x exchanges   h heals or is healed   z frozen   / cut off   ! a fault"
_ORDER = " .=xhz/!"  # of two signs for one column, the later one is drawn


def picture(seen: Seen, width: int = WIDTH) -> list[str]:
    """The lines of the picture: seconds above, islands below, and the meeting place if it had a fault."""
    first_s = seen.first_s
    last_s = max((each.at_s for each in seen.events), default=seen.begin_s + 1.0)
    scale_s = max(last_s - first_s, 1e-3) / width

    def column(at_s: float) -> int:
        return min(width - 1, max(0, int((at_s - first_s) / scale_s)))

    islands = sorted({ran.island for ran in seen.ran})
    rows = {f"island {island}": _row(seen, island, width, column) for island in islands}
    of_place = [number for number in seen.done if seen.faults[number].is_of_place]
    if of_place:
        cells = ["="] * width
        for number in of_place:
            cells[column(seen.done[number])] = "!"
        rows["meet"] = cells
    wide = max(map(len, rows), default=0)
    end = f"{last_s - first_s:.0f} s"
    lines = [f"{'':{wide}}  0 s{end:>{width - 3}}"]
    lines += [f"{name:{wide}}  {''.join(cells).rstrip()}" for name, cells in rows.items()]
    return [*lines, LEGEND]


def _row(seen: Seen, island: int, width: int, column: Column) -> list[str]:
    cells = [" "] * width

    def draw(sign: str, begin_s: float, end_s: float) -> None:
        for place in range(column(begin_s), column(end_s) + 1):
            if _ORDER.index(sign) >= _ORDER.index(cells[place]):
                cells[place] = sign

    for ran in seen.ran:
        if ran.island == island:
            _draw_process(seen, ran, draw)
    for wait in waits(seen):
        if wait.island == island:
            for place in range(column(wait.begin_s), column(wait.end_s) + 1):
                cells[place] = "." if cells[place] == "=" else cells[place]
    own = [each for each in seen.events if each.island == island and not each.rank]
    healing = {(each.number, each.attempt) for each in own if each.what in ("heals", "healed")}
    begun = dict[tuple[int, int], float]()
    for event in own:
        key = event.number, event.attempt
        if event.what == "exchanges":
            begun[key] = event.at_s
        elif event.what in ("holds", "fails") and key in begun:
            draw("h" if key in healing else "x", begun[key], event.at_s)
    for number, at_s in seen.done.items():
        fault = seen.faults[number]
        if fault.island == island:
            if fault.what in ("freeze", "cut"):
                end_s = min(at_s + fault.seconds, max((r.end_s for r in seen.ran if r.island == island), default=inf))
                draw("z" if fault.what == "freeze" else "/", at_s, min(end_s, seen.end_s))
            draw("!", at_s, at_s)
    return cells


def _draw_process(seen: Seen, ran: Ran, draw: Draw) -> None:
    last_s = max((each.at_s for each in seen.events if each.pid and each.island == ran.island), default=ran.begin_s)
    draw(".", ran.begin_s, min(ran.end_s, max(last_s, ran.begin_s)))
    trains = [
        each.at_s
        for each in seen.events
        if each.what == "trains" and each.island == ran.island and not each.rank and ran.begin_s <= each.at_s
    ]
    if trains and trains[0] <= ran.end_s:
        draw("=", trains[0], min(ran.end_s, last_s))
