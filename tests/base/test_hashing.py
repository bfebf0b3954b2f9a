"""Hashes that are kept stay in their process."""

import os
import pickle
import subprocess
import sys

from terrace.cluster.presets import load_cluster


def test_a_kept_hash_is_not_pickled_and_values_stay_equal() -> None:
    cluster = load_cluster("dgx-a100")
    again = pickle.loads(pickle.dumps(cluster)) if hash(cluster) else cluster
    assert "_hash" in vars(cluster)
    assert "_hash" not in vars(again)
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert {cluster: 1}[again]


def test_a_value_from_a_process_with_other_hashes_is_found() -> None:
    cluster = load_cluster("dgx-a100")
    hash(cluster)
    # The hash of a text depends on the process; a hash that came along would be another than its equals' there.
    environment = dict(os.environ, PYTHONHASHSEED="7")
    code = (
        "import pickle, sys\n"
        "from terrace.cluster.presets import load_cluster\n"
        "print({load_cluster('dgx-a100'): 'found'}[pickle.load(sys.stdin.buffer)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(cluster), capture_output=True, env=environment, check=True
    )
    assert done.stdout == b"found\n"
