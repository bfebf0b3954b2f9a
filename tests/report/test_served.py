"""A page that is served while its run is under way: to this machine alone, updated after each change, until Ctrl-C."""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from terrace.cli.main import main
from terrace.report.served import ADDRESS, LivePage, served
from tests.support.pages import checked
from tests.support.tiny_runs import started

PAGE = "<!doctype html><html><body><main>{}</main></body></html>"


@contextmanager
def serving(page: LivePage) -> Iterator[int]:
    with served(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(
    port: int, path: str, host: str = ADDRESS, method: str = "GET", names_port: bool = True
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection(ADDRESS, port, timeout=20)
    try:
        connection.request(method, path, headers={"Host": f"{host}:{port}" if names_port else host})
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def test_the_page_changes_with_its_files_and_only_then(tmp_path: Path) -> None:
    made = list[int]()

    def make() -> str:
        made.append(len(made))
        return PAGE.format((tmp_path / "metrics.jsonl").read_text())

    (tmp_path / "metrics.jsonl").write_text("one")
    live = LivePage([tmp_path], make)
    with serving(live) as port:
        answer, page = ask(port, "/")
        assert (answer.status, answer.getheader("Cache-Control")) == (200, "no-store")
        assert "<main>one</main>" in page
        checked(page)
        _, state = ask(port, "/state")
        assert f'"{state}"' in page, "the page knows its own state"
        (tmp_path / "report.html").write_text("no news")
        assert ask(port, "/state")[1] == state
        assert made == [0]
        (tmp_path / "metrics.jsonl").write_text("one two")
        live._not_before_s = 0.0
        _, later = ask(port, "/state")
        assert later != state
        assert "<main>one two</main>" in ask(port, "/", host="localhost")[1]
        assert made == [0, 1]
        # Right after that the page rests, however fast its files grow.
        live._not_before_s = float("inf")
        (tmp_path / "metrics.jsonl").write_text("one two three")
        assert ask(port, "/state")[1] == later
        assert "<main>one two</main>" in ask(port, "/")[1]


# A browser for the script of a page: four polls, of which the second gets no answer.
BROWSER = """
const states = ["STATE", null, "STATE", "another"], note = { hidden: true };
const script = require("fs").readFileSync(0, "utf8");
global.document = { getElementById: (id) => id === "stands" && note };
global.location = { reload: () => { console.log(`reload after ${4 - states.length}`); process.exit(0); } };
global.setTimeout = (again, wait) => setImmediate(again);
global.fetch = async (path) => {
  const state = states.shift();
  if (states.length < 3) console.log(path, note.hidden ? "live" : "still");
  if (state === null) throw new Error("nobody answers");
  return { ok: true, text: async () => state };
};
eval(script);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the script of the page")
def test_an_open_page_loads_itself_again_and_says_when_nobody_answers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("one")
    state, page = LivePage([tmp_path], lambda: PAGE.format("page")).current()
    script = page.partition("<script>")[2].partition("</script>")[0]
    surroundings = BROWSER.replace("STATE", state)
    done = subprocess.run(["node", "-e", surroundings], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["/state live", "/state still", "/state live", "reload after 4"]


def test_others_get_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("secret = 1\n")
    with serving(LivePage([tmp_path], lambda: PAGE.format("page"))) as port:
        # A name of somebody's own that leads to this machine.
        for host in ("evil.example", f"{ADDRESS}.evil.example", ""):
            answer, said = ask(port, "/", host=host)
            assert answer.status == 403
            assert "page" not in said
        # Of port 80, browsers name the host alone.
        assert ask(port, "/", host="localhost", names_port=False)[0].status == 200
        assert ask(port, "/", host="evil.example", names_port=False)[0].status == 403
        for path in ("/config.toml", "/../config.toml", "/state/", "/?a/../config.toml"):
            answer, said = ask(port, path)
            assert answer.status == (200 if path.startswith("/?") else 404)
            assert "secret" not in said
        assert ask(port, "/", method="POST")[0].status == 501
        with socket.socket() as outside:
            outside.settimeout(5)
            # Every address of 127/8 is this machine, and only one of them is listened on.
            assert outside.connect_ex(("127.0.0.2", port)) != 0


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with socket.socket() as other:
        other.bind((ADDRESS, 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["report", str(tmp_path), "--watch", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port {port} is not available (Address already in use): name another with --port N, or 0" in line


def test_the_command_follows_a_run_until_ctrl_c(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("[train]\nsteps = 9\n")
    with started("report", "run", "--watch", "--port", "0", cwd=tmp_path) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(rf"http://{re.escape(ADDRESS)}:(\d+)/ shows the page.*\n", said)
        assert found is not None, said
        _, page = ask(int(found[1]), "/")
        assert "Not finished: no step has ended yet." in page
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert rest.endswith("ended\n")
    assert not (run / "report.html").exists()
