"""`terrace meet`: the meeting place of a roster of islands (docs/elastic.md)."""

import argparse
import time
from collections.abc import Sequence

from terrace.base.errors import ConfigError
from terrace.cli.output import Terminated, sigterm_raises
from terrace.train.elastic_keys import address_of


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    host, port = address_of(options.place, is_own=True)
    if options.islands < 1:
        raise ConfigError(f"--islands {options.islands}: the run begins with so many islands; use 1 or more")
    from terrace.launch.start import secret  # imports torch, so not before the options are checked
    from terrace.roster.place import Place

    try:
        with sigterm_raises():
            place = Place(host, port, secret().within("roster"), options.log, options.islands, _say)
            _say(f"meeting at port {place.port}, log {options.log}; islands: terrace train --meet HOST:{place.port}")
            place.serve()
    except (Terminated, KeyboardInterrupt) as ended:
        name = ended.name if isinstance(ended, Terminated) else "SIGINT"
        words = f"{options.log} has every decision; islands wait for a meeting place at this port with this --log"
        raise Terminated(name, words) from None
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
