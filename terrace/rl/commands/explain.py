"""`terrace rl --explain`: the predicted seconds of an iteration by role, stage and pool, and with `--place auto` the
fastest placement. Starts nothing.
"""

from terrace.base.errors import ConfigError
from terrace.cli.terminal import Terminal
from terrace.rl.commands.placement_words import (
    against_words,
    flow_words,
    groups_words,
    iteration_words,
    pools_table,
    roles_table,
)
from terrace.rl.config import RlConfig, to_toml_table
from terrace.rl.making import check_roles
from terrace.rl.placement.placement import price
from terrace.rl.placement.search import FoundPlacements
from terrace.rl.predicted import dataflow_of, found_placements, placed_run, placement_of
from terrace.rl.resolve import parse


def placed(config: RlConfig) -> RlConfig:
    """The run in the fastest placement that the search finds, which is also printed.

    Raises `ConfigError` for a run with its own pools or per-role plans.
    """
    if config.pool or config.plans:
        raise ConfigError(
            "--place auto finds pools and plans of roles, and the run has its own: leave out [[pool]] and [plans], or "
            "leave out --place"
        )
    best = found_placements(config).best[0]
    console = Terminal()
    console.print(roles_table(best.report, config.cluster, f"the fastest placement: {groups_words(best.report)}"))
    print(f"{iteration_words(best.report)}\n")
    # The search does not know every requirement of a run's algorithm on a plan.
    found = parse(to_toml_table(placed_run(config, best.placement)))
    check_roles(found)
    return found


def explain(config: RlConfig, *, search: bool) -> None:
    """Prints the predicted cost of the run's placement, and with `search` the best placement. Refuses what a run would
    refuse.
    """
    check_roles(config)
    flow, cluster, console = dataflow_of(config), config.cluster, Terminal()
    report = price(flow, placement_of(config), cluster)
    print(f"{flow_words(flow)}\n")
    console.print(
        roles_table(report, cluster, "seconds of an iteration and bytes of a rank, as the run places its roles")
    )
    print(f"{iteration_words(report)}\n")
    console.print(pools_table(report))
    if search:
        _show(found_placements(config), config, console)


def _show(found: FoundPlacements, config: RlConfig, console: Terminal) -> None:
    best, *others = found.best
    console.print(roles_table(best.report, config.cluster, f"the fastest placement: {groups_words(best.report)}"))
    print(f"{iteration_words(best.report)}\n")
    console.print(pools_table(best.report))
    if others:
        print("other groupings of the roles, each at its best, against it:")
        print("\n".join(f"  {against_words(best.report, each.report)}" for each in others))
