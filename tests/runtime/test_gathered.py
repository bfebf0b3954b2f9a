"""Values of all ranks arrive as they were sent, without pickles."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.comm.exchange import gather_plain, gather_tensors
from terrace.launch.start import LocalPool, World

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


def own(rank: int) -> tuple[Any, list[torch.Tensor]]:
    """A rank's value and tensors: of other lengths, dtypes and shapes on every rank."""
    value = [None, {"name": "ü" * rank, "list": list(range(rank)), "x": 0.1 * rank}, True][: rank + 1]
    tensors = [
        torch.arange(rank * 3, dtype=torch.float64).reshape(3, rank),
        torch.tensor(float(rank), dtype=torch.bfloat16),
        torch.tensor([rank % 2 == 0, True]),
        torch.zeros(0, 4, dtype=torch.int16),
    ]
    return value, tensors[rank:]


def gathered(world: World) -> int:
    device = torch.device("cpu")
    value, tensors = own(world.rank)
    assert gather_plain(value, device) == [own(rank)[0] for rank in range(world.world_size)]
    assert all(math.isnan(each) for each in gather_plain(math.nan, device))
    for rank, there in enumerate(gather_tensors(tensors, device)):
        for mine, other in zip(own(rank)[1], there, strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
    with pytest.raises(TypeError):
        gather_plain(object(), device)
    return len(gather_tensors([], device))


def test_values_and_tensors_of_all_ranks(pool: LocalPool) -> None:
    assert pool.run(4, gathered) == [4] * 4


def test_nothing_between_processes_is_pickled_but_by_a_parent_and_its_own_children() -> None:
    """Pipes of the process pool are private, links of roles prove a secret; all other values are JSON or tensors.

    Pickles of `torch.distributed.checkpoint` are read without calling anything (tests/model/test_dcp_damage.py).
    """
    words = ("import pickle", "gather_object", "object_list", "allow_pickle=True")
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "terrace").rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    pool, roles = {"process_pool.py", "workers.py"}, {"calls/local.py", "calls/serve.py"}
    files = {f"terrace/model/dcp/{name}.py" for name in ("pickled", "writing")}
    assert users == files | {f"terrace/launch/{name}" for name in pool} | {f"terrace/rl/{name}" for name in roles}
