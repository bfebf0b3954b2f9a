"""Checks keys of `terrace train` for commands that start no run.

`terrace simulate` and `terrace doctor` read no corpus, and a run's file may name paths of another machine. But a key on
the command line was set on purpose, so it is refused here if `terrace train` would refuse it. Of a corpus, only the
first part is opened.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.train.config import RunConfig

BYTES, AUTO = "bytes", "auto"
_OF_TOKENIZER = {"tokenizer", "bos", "eos"}
_OF_SOURCES = {"path", "mixture", "format", "column", "split", "separator"}


def check_inputs(run: RunConfig, given: Mapping[str, Any]) -> None:
    """Raises the `TerraceError` that `terrace train` would raise for the keys `given`, nested tables of overrides."""
    data, train = (given.get(name) for name in ("data", "train"))
    if isinstance(train, Mapping) and "metrics" in train:
        from terrace.train.trackers import check_installed

        check_installed(run.train.metrics)
    if run.data.tokenizer == BYTES and (run.data.bos, run.data.eos) != (AUTO, AUTO):
        from terrace.data.tokenizer import load_tokenizer

        load_tokenizer(BYTES, run.data.bos, run.data.eos)
    if not isinstance(data, Mapping) or not data:
        return
    # Here, since these need numpy, and most commands name no data.
    from terrace.data.chat_tokens import holds_conversations
    from terrace.data.corpus import corpus_units
    from terrace.data.indexed import is_indexed
    from terrace.data.tokenizer import load_tokenizer
    from terrace.train.folder import check_tokenizer

    config = run.data.absolute()
    if _OF_TOKENIZER & data.keys():
        check_tokenizer(load_tokenizer(config.tokenizer, config.bos, config.eos), run)
    sources = config.sources() if _OF_SOURCES & data.keys() else ()
    for spec in (*sources, *(config.eval_sources() if "eval" in data else ())):
        if spec.format != "text":
            holds_conversations(spec.path, spec.split)
        elif not is_indexed(spec.path):
            next(corpus_units(spec.path, spec.column, spec.split, separator=spec.separator), None)
    _check_cache(Path(config.cache))


def _check_cache(folder: Path) -> None:
    for each in (folder, *folder.parents):
        if each.exists():
            if not each.is_dir():
                raise DataError(f"data.cache = {str(folder)!r} cannot be made, since {each} is a file: name another")
            return
