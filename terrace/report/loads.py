"""Expert load: a sentence, and heat maps of layers and experts over the steps of a run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from terrace.base.printable import escape
from terrace.plan.wire import ROUTED, MessageClass
from terrace.train.loads import LoadsOfSteps

LOAD_TITLE = "Load of experts"
ROUTED_COLUMN = {"experts": (*ROUTED, MessageClass.CHOICES)}  # heading -> message classes whose waits it sums

# (Upper bound of load over the layer's mean, opacity of the cell); an idle expert is a cross.
_LEVELS = ((0.5, 0.12), (0.8, 0.3), (1.25, 0.5), (2.0, 0.75), (float("inf"), 1.0))
_WORDS = ("below 0.5 of the mean", "0.5 to 0.8", "0.8 to 1.25", "1.25 to 2", "2 times and more")
_MOST_CELLS, _MOST_MAPS = 24_000, 6
_WIDTH, _GUTTER, _TOP, _GAP, _AXIS = 350, 34, 4, 1, 18


def load_words(load: Mapping[str, float]) -> str:
    rank = f", the busiest rank {load['busiest_rank']:.2f} times" if "busiest_rank" in load else ""
    return (
        f"load of experts: the busiest has {load['busiest_expert']:.2f} times the mean of its layer{rank}; MaxVio "
        f"{load['max_vio']:.3g}, entropy {load['entropy']:.3f} (1 is even), {load['idle']:.3g} without a token"
    )


def heat_maps(parts: Sequence[LoadsOfSteps]) -> str:
    """At most six heat maps of layers and experts, each for a range of steps; empty without load data."""
    layers = list(dict.fromkeys(name for part in parts for name in part.counts))
    num_cells = sum(max(len(part.counts.get(name, ())) for part in parts) for name in layers)
    if not num_cells:
        return ""
    num_maps = max(1, min(_MOST_MAPS, len(parts), _MOST_CELLS // num_cells))
    edges = [len(parts) * number // num_maps for number in range(num_maps + 1)]
    tiles = []
    for start, stop in pairwise(edges):
        stretch = parts[start:stop]
        rows = {name: _summed([part.counts[name] for part in stretch if name in part.counts]) for name in layers}
        title = f"Steps {stretch[0].first} to {stretch[-1].last}"
        tiles.append(f"<figure><h3>{title}</h3>{_map_svg(title, rows)}</figure>")
    entries = [
        f'<li><i style="background:var(--c-forward);opacity:{opacity}"></i>{words}</li>'
        for (_, opacity), words in zip(_LEVELS, _WORDS, strict=True)
    ]
    key = f"<ul class=legend><li>x no token</li>{''.join(entries)}</ul>"
    return f"<div class=tiles>{''.join(tiles)}</div>{key}<p class=quiet>A row is a layer, a column an expert.</p>"


def _summed(tables: Sequence[Sequence[int]]) -> list[int]:
    # A damaged file may have rows of different lengths.
    return [sum(column) for column in zip(*tables, strict=False)]


def _map_svg(title: str, rows: Mapping[str, Sequence[int]]) -> str:
    columns = max(map(len, rows.values()))
    across = (_WIDTH - _GUTTER) / max(1, columns)
    down = max(4.0, min(18.0, across, 400 / len(rows)))
    gap = _GAP if across > 4 * _GAP else 0
    paths, crosses = [""] * len(_LEVELS), ""
    names = []
    for number, (name, row) in enumerate(rows.items()):
        y = _TOP + number * down
        if len(rows) <= 24 or number % 4 == 0:
            short = escape(name.rpartition(".")[2])
            names.append(f'<text x="{_GUTTER - 6}" y="{y + down / 2 + 4:.1f}" text-anchor="end">{short}</text>')
        mean = sum(row) / len(row) if row else 0.0
        for column, tokens in enumerate(row):
            x = _GUTTER + column * across
            wide, high = across - gap, down - gap
            if not tokens or not mean:
                crosses += f"M{x:.1f} {y:.1f}l{wide:.1f} {high:.1f}m0 {-high:.1f}l{-wide:.1f} {high:.1f}"
                continue
            level = next(number for number, (most, _) in enumerate(_LEVELS) if tokens / mean < most)
            paths[level] += f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z"
    height = _TOP + len(rows) * down + _AXIS
    shapes = [
        f'<path d="{path}" fill="var(--c-forward)" fill-opacity="{opacity}"/>'
        for path, (_, opacity) in zip(paths, _LEVELS, strict=True)
        if path
    ]
    axis = f'<text x="{_GUTTER}" y="{height - 4:.1f}">expert 0</text>'
    axis += f'<text x="{_WIDTH}" y="{height - 4:.1f}" text-anchor="end">{columns - 1}</text>'
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="Load of experts, {title}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(names)}{"".join(shapes)}'
        f'<path class="grid" d="{crosses}"/>{axis}</svg>'
    )
