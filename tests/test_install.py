"""`make setup` shows progress: a line for each large download, the seconds in between, and the output of a failure."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOOK = runpy.run_path(str(ROOT / ".ci" / "install.py"))
# As pip 23 to 26 write it.
OUTPUT = """\
Obtaining file:///work
Collecting torch==2.13.0 (from -c constraints.txt)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (780.5 MB)
Using cached nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)
Downloading rich-14.0.0-py3-none-any.whl (243 kB)
  Downloading https://example.org/simple/deepspeed-0.18.2.tar.gz (1.5 MB)
Installing collected packages: torch, rich, deepspeed
Successfully installed deepspeed-0.18.2 rich-14.0.0 torch-2.13.0
"""


def test_lines_of_pip_become_few() -> None:
    found = [words for line in OUTPUT.splitlines() if (words := HOOK["shown"](line))]
    assert found == [
        "  torch 2.13.0, 780.5 MB",
        "  nvidia_cublas 13.1.0.3, 1.2 GB",
        "  deepspeed 0.18.2, 1.5 MB",
        "  installing 3 packages",
    ]


@pytest.mark.parametrize("code", [0, 3])
def test_an_installation_says_how_it_goes_and_ends(code: int, tmp_path: Path) -> None:
    program = f"import sys, time; print({OUTPUT!r}, flush=True); time.sleep(0.5); print('ERROR: no'); sys.exit({code})"
    said: list[str] = []
    ended = HOOK["install"]([sys.executable, "-c", program], tmp_path / "log", said.append, 0.2)
    assert ended == code
    assert (tmp_path / "log").read_text().startswith(OUTPUT)
    text = "\n".join(said)
    assert "torch 2.13.0, 780.5 MB" in text
    assert re.search(r"^  \.\.\. \d+ s$", text, re.M)
    assert "ERROR: no" in text
    # All of it only where it failed.
    assert ("Successfully installed" in text) == (code != 0)
    assert ("has all of the output" in text) == (code != 0)


def test_every_installation_of_the_makefile_goes_this_way() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "pip install" not in text
    assert "INSTALL := $(BIN)/python .ci/install.py" in text
    assert text.count("$(INSTALL)") == 3


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    """Of all that a user's installation brings, and nothing else: `make test-oldest` shows that these bounds hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(line for name in ("train", "hf", "data", "metrics", "kernels", "liger") for line in extras[name]),
    ]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", line) for line in wanted if not line.startswith("terrace-train[")]
    assert all(bounds), f"an entry of {wanted} has no lower bound"
    pins = [
        line for line in (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"
    ]
    assert pins == sorted(f"{bound[1]}=={bound[2]}" for bound in bounds if bound)
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-c constraints-oldest.txt -e '.[train,hf,data,metrics,liger]'" in make
