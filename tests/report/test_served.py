"""A page that is served while its run is under way: to this machine alone, updated after each change, until Ctrl-C."""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from terrace.cli.main import main
from terrace.report.run_view import run_view
from terrace.report.served import ADDRESS, LivePage, served
from tests.support.pages import checked
from tests.support.tiny_runs import started

PAGE = "<!doctype html><html><body><main>{}</main></body></html>"


@contextmanager
def serving(page: LivePage) -> Iterator[tuple[int, str]]:
    """(Port, beginning of every path)."""
    with served(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port, f"/{server.token}"
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
    with serving(live) as (port, own):
        answer, page = ask(port, f"{own}/")
        assert (answer.status, answer.getheader("Cache-Control")) == (200, "no-store")
        assert "<main>one</main>" in page
        checked(page)
        _, state = ask(port, f"{own}/state")
        assert f'"{state}"' in page, "the page knows its own state"
        (tmp_path / "report.html").write_text("no news")
        assert ask(port, f"{own}/state")[1] == state
        assert made == [0]
        (tmp_path / "metrics.jsonl").write_text("one two")
        live._not_before_s = 0.0
        _, later = ask(port, f"{own}/state")
        assert later != state
        assert "<main>one two</main>" in ask(port, f"{own}/", host="localhost")[1]
        assert made == [0, 1]
        # Right after that the page rests, however fast its files grow.
        live._not_before_s = float("inf")
        (tmp_path / "metrics.jsonl").write_text("one two three")
        assert ask(port, f"{own}/state")[1] == later
        assert "<main>one two</main>" in ask(port, f"{own}/")[1]


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
    assert done.stdout.splitlines() == ["state live", "state still", "state live", "reload after 4"]


def test_others_get_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("secret = 1\n")
    with serving(LivePage([tmp_path], lambda: PAGE.format("page"))) as (port, own):
        # A name of somebody's own that leads to this machine.
        for host in ("evil.example", f"{ADDRESS}.evil.example", ""):
            answer, said = ask(port, f"{own}/", host=host)
            assert answer.status == 403
            assert "page" not in said
        # Of port 80, browsers name the host alone.
        assert ask(port, f"{own}/", host="localhost", names_port=False)[0].status == 200
        assert ask(port, f"{own}/", host="evil.example", names_port=False)[0].status == 403
        for path in ("/config.toml", "/../config.toml", "/state/", "/?a/../config.toml"):
            answer, said = ask(port, own + path)
            assert answer.status == (200 if path.startswith("/?") else 404)
            assert "secret" not in said
        assert ask(port, f"{own}/", method="POST")[0].status == 501
        answer, said = ask(port, own)
        assert (answer.status, answer.getheader("Location"), said) == (301, f"{own}/", "")
        with socket.socket() as outside:
            outside.settimeout(5)
            # Every address of 127/8 is this machine, and only one of them is listened on.
            assert outside.connect_ex(("127.0.0.2", port)) != 0


def test_another_user_of_this_machine_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with serving(LivePage([tmp_path], lambda: PAGE.format("page"))) as (port, own):
        assert ask(port, f"{own}/")[0].status == 200
        assert len(own) > 30
        for guess in ("", "/state", "//", "//state", own[:-1] + "/", f"{own}x/"):
            answer, said = ask(port, guess or "/")
            assert answer.status == 404
            assert "page" not in said
            assert own not in said
    with serving(LivePage([tmp_path], lambda: PAGE.format("page"))) as (_, later):
        assert later != own


def test_slow_clients_neither_stay_nor_lock_the_owner_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setattr("terrace.report.served._REQUEST_S", 1.0)
    with serving(LivePage([tmp_path], lambda: PAGE.format("page"))) as (port, own), ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((ADDRESS, port), timeout=20)) for _ in range(100)]
        # Far more than there are places for, and the owner is answered.
        assert ask(port, f"{own}/")[0].status == 200
        assert threading.active_count() < 60
        # The last is cut although it goes on sending.
        last, begin_s, parts = slow[-1], time.monotonic(), 0
        last.settimeout(0.1)
        while time.monotonic() - begin_s < 20:
            try:
                if last.recv(1) == b"":
                    break
            except TimeoutError:
                last.sendall(b"G" if not parts else b"E")
                parts += 1
            except ConnectionError:
                break
        assert 0.5 < time.monotonic() - begin_s < 10
        assert parts > 2


def test_a_pipe_in_place_of_a_file_stops_no_answer(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    os.mkfifo(tmp_path / "metrics.jsonl")
    page = LivePage([tmp_path], lambda: PAGE.format(len(run_view(tmp_path).missing)))
    with serving(page) as (port, own):
        assert ask(port, f"{own}/")[0].status == 200


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
        found = re.fullmatch(rf"http://{re.escape(ADDRESS)}:(\d+)(/[\w-]+/) shows the page.*\n", said)
        assert found is not None, said
        _, page = ask(int(found[1]), found[2])
        assert "Not finished: no step has ended yet." in page
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert rest.endswith("ended\n")
    assert not (run / "report.html").exists()
