"""Dotted overrides on a command line, `--section.key VALUE`, and `--ranks N`. Needs no configuration of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import merge, parse_override
from terrace.cli.here import named_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import lay_over, parse_cluster, sizes_for
from terrace.plan.presets import PRESETS


def read_cluster(name: str, rest: Sequence[str], instead: str, ranks: int | None = None) -> Cluster:
    """Cluster `name` with the dotted overrides in `rest` and, if given, resized to `ranks` ranks.

    `instead` tells the user where other keys belong.
    """
    overrides = parse_overrides(rest, of_run=False)
    for section in overrides:
        if section != "cluster":
            raise ConfigError(f"--{section}.… is no key of a cluster: {instead}")
    table = named_table(name, ranks)
    return parse_cluster(lay_over({"cluster": table}, with_ranks(ranks, overrides, table))["cluster"])


def parse_overrides(rest: Sequence[str], *, of_run: bool = True) -> dict[str, Any]:
    """Nested tables from `--a.b VALUE` and `--a.b=VALUE`. Raises `ConfigError` for any other word.

    With `of_run` all sections of a run can be set, so an error may suggest one.
    """
    table: dict[str, Any] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            # The likely slip: a plan without its flag.
            if not word.startswith("-") and (word.endswith(".toml") or word in PRESETS):
                raise ConfigError(f"unknown argument {word!r}: a plan is given as --plan {word}; see --help")
            meant = [f"--{section}.{name}" for section in _sections(name)] if of_run and word[:2] == "--" else []
            hint = (
                f"; did you mean {' or '.join(meant)}?"
                if meant
                else ": keys are set as --section.key VALUE; see --help"
            )
            raise ConfigError(f"unknown argument {word!r}{hint}")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: write --{name} VALUE")
            value = words.pop(0)
        # Later overrides win.
        table = merge(table, parse_override(name, value))
    return table


def take_word(rest: Sequence[str]) -> tuple[str | None, list[str]]:
    """The first positional word in `rest`, or None, and the remaining words.

    A bare word is positional unless it is the value of the preceding `--section.key`.
    """
    words = list(rest)
    index = 0
    while index < len(words):
        if not words[index].startswith("--"):
            return words[index], words[:index] + words[index + 1 :]
        # `--a.b VALUE` takes the next word, `--a.b=VALUE` none.
        has_value = "=" not in words[index] and index + 1 < len(words) and not words[index + 1].startswith("--")
        index += 2 if has_value else 1
    return None, words


def _sections(key: str) -> list[str]:
    # For an error alone: importing the sections takes a moment.
    from terrace.train.config import sections_with

    return sections_with(key)


def with_ranks(ranks: int | None, overrides: dict[str, Any], cluster: Any) -> dict[str, Any]:
    """`overrides` with tier sizes that resize `cluster` (a table) to `ranks` ranks; unchanged if `ranks` is None.

    Raises `ConfigError` if the overrides already set a size.
    """
    if ranks is None:
        return overrides
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    own = overrides.get("cluster", {})
    tiers = own.get("tiers", {}) if isinstance(own, Mapping) else own
    # Anything else is refused where the overrides are laid over the cluster.
    if not isinstance(tiers, Mapping) or not all(isinstance(tier, Mapping) for tier in tiers.values()):
        return overrides
    sized = [name for name, tier in tiers.items() if "size" in tier]
    if sized:
        raise ConfigError(
            f"--ranks {ranks} gives every tier its size, and so does --cluster.tiers.{sized[0]}.size: leave one out"
        )
    found = parse_cluster(dict(cluster)).tiers if isinstance(cluster, Mapping) else ()
    sizes = sizes_for(ranks, [tier.size for tier in found]) if found else []
    sizes_of = {tier.name: {"size": size} for tier, size in zip(found, sizes, strict=True)}
    return merge(overrides, {"cluster": {"tiers": sizes_of}})
