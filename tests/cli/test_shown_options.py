"""Options and keys of the commands that documents show, every day: the commands of long pages run by night."""

import dataclasses
import shlex

import pytest

from terrace.cli.keys import sections
from terrace.cli.main import _parsed, _split_program
from tests.support.documents import runs_here

OF_RUNS = {"task", "objective", "plan", "cluster", "model"}  # keys of a run's file that are in no section


@pytest.mark.parametrize("document", sorted({name for name, _ in runs_here()}))
def test_commands_of_a_document_have_options_and_keys_that_exist(document: str) -> None:
    for words in (shlex.split(command) for name, command in runs_here() if name == document):
        own, _ = _split_program(words[words.index("terrace") + 1 :])
        _, rest = _parsed(own)
        for word in (word for word in rest if word.startswith("--")):
            section, _, key = word.removeprefix("--").partition("=")[0].rpartition(".")
            assert section or key in OF_RUNS, word
            keys = {field.name for field in dataclasses.fields(sections()[section])} if section in sections() else {key}
            assert key in keys, word
