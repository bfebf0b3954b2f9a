"""SECURITY.md: each of its sentences on what is trusted, refused or bounded has a test, or says a fact of others."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACT = ""  # of other programs, advice, or the beginning of a list: nothing of Terrace's to hold
LINKS, FOLDER, FOREIGN = "cli/test_links_out.py", "cli/test_working_folder.py", "base/test_foreign.py"
SERVED, DCP, CHAT = "report/test_served.py", "model/test_dcp_damage.py", "data/test_chat.py"
COPIES = "checkpoint/test_peer_memory.py::test_a_folder_that_others_may_use_is_not_believed"
SEAL, MEETING, RENDEZVOUS = "launch/test_seal.py", "system/test_meeting.py", "launch/test_rendezvous.py"

# Beginning of a sentence -> file::test below tests/.
TESTS = {
    "terrace meet and the ranks of its islands open ports": "roster/test_roster_strangers.py::",
    "Whoever connects must prove the secret over a number": (
        "roster/test_roster_strangers.py::test_a_line_counts_at_its_place_in_its_connection_alone"
    ),
    "Tensors travel in the clear": FACT,
    "The configuration and the command line": FACT,
    "The ranks of the run": FACT,
    "They share a secret and do not defend": f"{RENDEZVOUS}::test_a_rank_without_the_secret_is_named_within_seconds",
    "The network between the ranks": FACT,
    "NCCL and gloo carry parameters": FACT,
    "The working folder is not trusted": FACT,
    "No process of a command imports": f"{FOLDER}::test_no_command_imports_a_module_of_the_working_folder",
    "Of a folder with rewards": "rl/test_reward_function.py::test_a_reward_stands_for_no_installed_module",
    "python -m, and any Python under": FACT,
    "Anything that a stranger could have written": FACT,
    "Such files are read by strict parsers": "system/test_damage.py::",
    "The pickles in a folder of": "model/test_dcp.py::test_a_pickle_that_would_run_something_is_refused",
    "The time and memory of a parser": f"{DCP}::test_a_small_metadata_takes_no_long_time",
    "Files of model folders": f"{LINKS}::test_a_page_is_made_whatever_stands_in_place_of_a_file",
    "A link out of such a folder is refused": f"{LINKS}::test_no_small_file_of_a_model_is_copied_through_a_link",
    "A run does not write through a link": f"{LINKS}::test_a_run_does_not_write_through_a_link",
    "Links in a folder of data": f"{LINKS}::test_links_in_a_folder_of_data_are_followed",
    "A dataset's state.json": f"{LINKS}::test_a_data_set_names_no_file_elsewhere",
    "Chat templates run in a sandbox": f"{CHAT}::test_templates_run_in_a_sandbox",
    "Control characters in names": "base/test_printable.py::test_what_a_terminal_acts_on_is_spelled_out",
    "terrace report --watch listens": f"{SERVED}::test_others_get_nothing",
    "It shows the page only at an address": f"{SERVED}::test_another_user_of_this_machine_gets_nothing",
    "A request must arrive whole": f"{SERVED}::test_slow_clients_neither_stay_nor_lock_the_owner_out",
    "Without a launcher the ranks are": f"{RENDEZVOUS}::test_a_store_of_this_machine_listens_on_loopback_alone",
    "Under torchrun, srun or mpirun": FACT,
    "These ports must be reachable": FACT,
    "It cannot make the ranks run": f"{MEETING}::test_a_job_that_a_stranger_puts_into_the_store_is_not_believed",
    "The job travels as JSON": "train/test_job_text.py::",
    "The secret is the environment variable": f"{SEAL}::test_the_users_secret_is_made_once_and_for_its_user_alone",
    "Where the home folders": f"{RENDEZVOUS}::test_a_rank_without_the_secret_is_named_within_seconds",
    "Keep it out of scripts": FACT,
    "Learning from feedback sends calls": FACT,
    "They are pickled, so each end": "rl/test_local_roles.py::test_rows_go_from_process_to_process",
    "Rows lie in memory without a name": "rl/test_local_roles.py::test_whatever_rows_hold_arrives",
    "Ray runs the code of whoever": FACT,
    "Keep them, and those of gloo": FACT,
    "With train.peer_copies a run keeps": COPIES,
    "A folder that is a link": COPIES,
    "Please report a weakness": FACT,
}


def sentences() -> list[str]:
    text = re.sub(r"^#.*$", "", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = list[str]()
    for paragraph in re.split(r"\n\n+|\n(?=- )", text):
        flat = re.sub(r"[`*]", "", " ".join(paragraph.split())).removeprefix("- ")
        found += filter(None, re.split(r"(?<=[.])\s+(?=[A-Z]|python -m|terrace )", flat))
    return found


def test_every_sentence_has_its_test() -> None:
    without = [each for each in sentences() if not any(each.startswith(begin) for begin in TESTS)]
    assert not without, "name the test of these sentences in the table above"
    gone = [begin for begin in TESTS if not any(each.startswith(begin) for each in sentences())]
    assert not gone, "these are no sentences of SECURITY.md any more"


@pytest.mark.parametrize("named", sorted({*TESTS.values()} - {FACT}))
def test_the_tests_are_there(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    names = [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    assert name in names if name else names
