"""Words on what generates a run's responses, for its first screen."""

from terrace.base.words import counted
from terrace.rl.config import RlConfig
from terrace.rl.placing import ACTOR, ROLLOUT


def generators(config: RlConfig) -> str:
    """The replicas that generate, or the servers."""
    rows = config.run.rows
    if config.rollout.is_served:
        return f"{counted(len(config.rollout.urls), 'server')} ({config.rollout.server})"
    drawing = config.places[ROLLOUT if config.is_apart else ACTOR].cluster.world_size
    return f"{counted(drawing // rows, 'replica')} of {counted(rows, 'rank')}"


def unrepeatable(config: RlConfig) -> str:
    """A line on what servers cannot promise; "" without them."""
    if not config.rollout.is_served:
        return ""
    return (
        "\nwhat a server draws depends on the requests that run beside it: a run that is repeated or goes on has other "
        "responses"
    )
