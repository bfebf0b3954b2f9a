"""Which lines are a GPU's, and that those of a rehearsal are noted."""

from pathlib import Path

import pytest
import torch

from terrace.comm.lane import StreamLane
from tests.virtual_cuda.gpu_lines import FOLDER, executed, gpu_lines, in_source
from tests.virtual_cuda.rehearsal import rehearsed

SOURCE = """
def behind_a_return(device):
    if not has_streams(device):
        return 1
    for each in device:
        print(each)

def in_a_branch(device):
    if has_streams(device) and device:
        return 2
    elif device:
        return 3
    return 4

def on_either(device):
    if not has_streams(device) or device:
        return 5

class Whole:
    def run(self):
        return 6

    def on_a_cpu(self, device):
        if has_streams(device):
            return 7
        return 8
"""


def test_a_branch_is_the_gpus_if_it_asks_for_one() -> None:
    found = [(line.first, line.last, line.function) for line in in_source(SOURCE, "a.py", ["Whole*"])]
    assert found == [
        (5, 5, "behind_a_return"),
        (6, 6, "behind_a_return"),
        (10, 10, "in_a_branch"),
        (21, 21, "Whole.run"),
        (24, 24, "Whole.on_a_cpu"),
        (25, 25, "Whole.on_a_cpu"),
    ]


def test_lines_of_a_rehearsal_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with rehearsed():
        StreamLane(torch.device("cuda", 0)).submit(lambda: None).wait()
    done, left = executed(tmp_path)
    assert len(done) + len(left) == len(gpu_lines())
    functions = {line.function for line in done if line.file == "comm/lane.py"}
    assert functions == {"StreamLane.__init__", "StreamLane.submit", "_StreamTicket.__init__", "_StreamTicket.wait"}
