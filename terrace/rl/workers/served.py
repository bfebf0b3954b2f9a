"""A rollout by inference servers: hands weights over to them, shares requests out, and goes on where one fails.

    write   the actor's ranks write version n of the weights into a folder of the run (terrace.rl.hand_over.folder)
    load    every server loads it; one that does not answer is named, and draws nothing until the next hand-over
    draw    a request for each turn of a response, at the server with the fewest; the version of its weights is asked
            before and after it

A failed attempt is made again, after a pause that doubles. A server that stays away or exceeds the deadline is left
out, and its requests go to the others. A server with other weights than those that were handed over (one that was
started again meanwhile) is counted and loads them again, and what it drew is drawn again. Rounds draw whole responses.
"""

import queue
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from terrace.base.errors import ConfigError, TerraceError, TrainingError
from terrace.generation.request import Completion, Request
from terrace.launch.world import World
from terrace.model.facts import vocabulary_size
from terrace.rl.calls.call import call
from terrace.rl.values.rows import Rows
from terrace.rl.workers.completions import PATH, completion_of, request_body
from terrace.rl.workers.drawing import READS, requests_of, rows_of_completions
from terrace.rl.workers.engine_rows import device_of
from terrace.rl.workers.environments import NO_ENVIRONMENT, EnvironmentSettings, partner_of
from terrace.rl.workers.handing import weights_folder
from terrace.rl.workers.http_json import UnansweredError, exchange
from terrace.rl.workers.servers import ANSWERING, MOST_REQUESTS, RolloutKeys, filled
from terrace.rl.workers.settings import EngineSettings

_ATTEMPTS = 6  # of a request at one server; with the pauses between them, about 8 s
_FIRST_PAUSE_S = 0.25
_LOOK_S = 20.0  # deadline of answers that need no model: names and versions
_FOLDER = re.compile(r"[0-9a-f]{8}-\d{8,}")  # of `weights_folder`
_T = TypeVar("_T")
_R = TypeVar("_R")


class ServedRollout:
    """The worker of a rollout by the servers of `keys`. Each of its ranks draws a share of the rows from all."""

    def __init__(
        self,
        world: World | None,
        *,
        keys: RolloutKeys,
        settings: EngineSettings,
        handed: str,
        num_tokens: int,
        stops: frozenset[int],
        seed: int = 0,
        environment: EnvironmentSettings = NO_ENVIRONMENT,
    ) -> None:
        """Responses have at most `num_tokens` tokens, and their turns end with one of `stops`.

        Weights come through folders `handed` (`weights_folder`).
        """
        self._world, self._settings, self._handed = world, settings, handed
        self._drawing: dict[str, Any] = {"num_tokens": num_tokens, "stops": stops, "seed": seed}
        ranks = 1 if world is None else world.world_size
        self._servers = [_Server(url, keys, max(1, keys.requests // ranks)) for url in keys.urls]
        self._keys, self._version, self._weights, self._environment = keys, -1, Path(), environment
        self._changed = threading.Condition()  # of what servers do
        self._counts, self._is_over = Counter[str](), False

    @call()
    def load(self, version: int) -> dict[str, float]:
        """Have every server load this version. Raises `TrainingError` if none does."""
        self._version, self._weights, self._is_over = version, weights_folder(self._handed, version), False
        rank, ranks = (0, 1) if self._world is None else (self._world.rank, self._world.world_size)
        _together(self._load, self._servers[rank::ranks])
        answers = torch.tensor(
            [place % ranks == rank and server.is_up for place, server in enumerate(self._servers)],
            dtype=torch.int64,
            device=device_of(self._settings),
        )
        if self._world is not None:
            dist.all_reduce(answers)
        for server, is_up in zip(self._servers, answers.tolist(), strict=True):
            server.is_up = bool(is_up)
        if rank == 0:
            _clear(self._weights)
        if not any(server.is_up for server in self._servers):
            raise self._none_left()
        _together(_named, [server for server in self._servers if server.is_up])
        return {}

    @call(split="replica", take="replica", reads=READS, keeps_groups=True)
    def generate(self, rows: Rows, *, leave: Fraction = Fraction(0)) -> Rows:
        """Generate responses; arguments and result as for `Actor.generate`, of which none stays unfinished."""
        if self._version < 0:
            raise TrainingError("servers have no weights: call load first")
        partner = partner_of(self._environment, rows, self._drawing["stops"])
        requests = partner.first(requests_of(rows, **self._drawing))

        def whole(each: tuple[int, Request]) -> Completion:
            row, request = each
            while (goes_on := partner.answer(row, made := self._drawn(request))) is not None:
                request = goes_on
            return made

        # A thread that waits for an environment leaves its place at the servers to the others.
        num_threads = MOST_REQUESTS if self._environment.name else sum(server.most for server in self._servers)
        try:
            made = _together(whole, requests, num_threads)
        except TerraceError:
            with self._changed:
                self._is_over = True  # for the threads of the other requests
                self._changed.notify_all()
            raise
        partner.close()
        return rows_of_completions(made, partner.columns(made))

    @call(take="all")
    def counts(self) -> dict[str, float]:
        """Since the last call: repeated attempts, and servers found with other weights; servers that answer."""
        found = {f"sync/{name}": float(self._counts.pop(name, 0)) for name in ("repeated_requests", "stale_weights")}
        return found | {ANSWERING: float(sum(server.is_up for server in self._servers))}

    def _drawn(self, request: Request) -> Completion:
        failed, model = Counter[str](), self._settings.model
        while True:
            server = self._taken()
            try:
                if self._is_current(server):
                    body = request_body(request, server.name, self._keys.words.request)
                    answer = exchange(server.url, PATH, body, self._keys.deadline_s)
                    found = completion_of(answer, request, server.url, vocabulary_size(model), self._version)
                    # Asked before alone, another run could have loaded its weights; after alone, another rank these.
                    if self._is_current(server):
                        return found
                error = UnansweredError("it goes on losing the weights that it has loaded")
                self._load(server)
            except UnansweredError as unanswered:
                self._count("repeated_requests")
                error = unanswered
            finally:
                self._gave_back(server)
            failed[server.url] += 1
            if error.is_late or failed[server.url] == _ATTEMPTS:
                self._left_out(server, str(error))
            else:
                time.sleep(_FIRST_PAUSE_S * 2 ** (failed[server.url] - 1))

    def _is_current(self, server: "_Server") -> bool:
        is_current = server.version() == str(self._weights)
        if not is_current:
            self._count("stale_weights")
        return is_current

    def _taken(self) -> "_Server":
        """The server with the fewest requests, once one has room."""
        with self._changed:
            while True:
                up = [server for server in self._servers if server.is_up]
                if not up or self._is_over:
                    raise self._none_left()
                free = [server for server in up if server.running < server.most]
                if free:
                    server = min(free, key=lambda each: each.running)
                    server.running += 1
                    return server
                self._changed.wait()

    def _gave_back(self, server: "_Server") -> None:
        with self._changed:
            server.running -= 1
            self._changed.notify()

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1

    def _load(self, server: "_Server") -> None:
        """Have a server load the current weights, unless it has them; if it cannot, it is left out."""
        with server.loading:
            for attempt in range(_ATTEMPTS):
                try:
                    server.load(self._weights)
                    with self._changed:
                        server.is_up, server.fault = True, ""
                        self._changed.notify_all()
                    return
                except UnansweredError as error:
                    server.fault = str(error)
                    if error.is_late:
                        break
                    time.sleep(_FIRST_PAUSE_S * 2**attempt)
        self._left_out(server, server.fault)

    def _left_out(self, server: "_Server", fault: str) -> None:
        with self._changed:
            is_news, server.is_up, server.fault = server.is_up or not server.was_left, False, fault
            server.was_left = True
            self._changed.notify_all()
        if is_news and not self._is_over:
            print(
                f"terrace: rollout server {server.url} is left out until the next hand-over: {fault}",
                file=sys.stderr,
                flush=True,
            )

    def _none_left(self) -> TrainingError:
        faults = "; ".join(f"{each.url}: {each.fault or 'left out on another rank'}" for each in self._servers)
        return TrainingError(
            f"no rollout server answers ({faults}): start one ({self._keys.words.start}) and resume the run"
        )


class _Server:
    """A server as a rank sees it: what it has to do, and whether it draws."""

    def __init__(self, url: str, keys: RolloutKeys, most: int) -> None:
        self.url, self._keys, self.most = url, keys, most
        self.running, self.name, self.fault = 0, "", ""
        self.is_up, self.was_left, self.loading = True, False, threading.Lock()

    def version(self) -> object:
        """The version of the weights that it holds, None if it has no name."""
        return _field(exchange(self.url, self._keys.words.version_path, None, _LOOK_S), "weight_version")

    def load(self, weights: Path) -> None:
        """Load a folder of weights unless it holds them. Raises as `exchange` does."""
        if self.version() == str(weights):
            return
        try:
            for path, body in self._keys.words.load:
                answer = exchange(self.url, path, filled(body, str(weights), str(weights)), self._keys.deadline_s)
                if _field(answer, "success") is False:
                    raise UnansweredError(f"{path} failed: {_field(answer, 'message') or 'it gives no reason'}")
        except TrainingError as error:
            raise TrainingError(
                f"{error}; it must see {weights} and be started so: {self._keys.words.start}"
            ) from error
        if (held := self.version()) != str(weights):
            raise UnansweredError(f"it has loaded {weights} and says that its weights are {held!r}")


def check_servers(keys: RolloutKeys, num_tokens: int) -> None:
    """Raise `ConfigError` unless every server of a run answers and takes texts of `num_tokens` tokens."""
    for url in keys.urls if keys.is_served else ():
        try:
            models = _models(url)
            exchange(url, keys.words.version_path, None, _LOOK_S)
        except (UnansweredError, TrainingError) as error:
            raise ConfigError(f"rollout.urls: {url}: {error}; start it first: {keys.words.start}") from error
        longest = models[0].get("max_model_len")
        if isinstance(longest, int) and longest < num_tokens:
            raise ConfigError(
                f"rollout.urls: {url} takes texts of up to {longest} tokens, and run.max_prompt + run.max_response = "
                f"{num_tokens}: raise its longest text, or lower these"
            )


def _named(server: _Server) -> None:
    try:
        server.name = str(_models(server.url)[0].get("id"))
    except UnansweredError:  # its first request finds out
        server.name = server.name or "default"


def _models(url: str) -> list[dict[str, Any]]:
    found = _field(exchange(url, "/v1/models", None, _LOOK_S), "data")
    if not isinstance(found, list) or not found or not isinstance(found[0], dict):
        raise TrainingError(f"rollout server {url} names no model at /v1/models")
    return found


def _field(answer: Any, key: str) -> Any:
    return answer.get(key) if isinstance(answer, dict) else None


def _together(work: Callable[[_T], _R], given: Sequence[_T], most: int = 64) -> list[_R]:
    """The results of `work` for each of `given`, by up to `most` threads. The first error is raised at once."""
    # Not an executor, which would wait for requests that no longer count before the error is raised.
    asked, found = queue.SimpleQueue[tuple[int, _T]](), queue.SimpleQueue[tuple[int, Any]]()
    for item in enumerate(given):
        asked.put(item)

    def run() -> None:
        while True:
            try:
                place, each = asked.get_nowait()
            except queue.Empty:
                return
            try:
                found.put((place, work(each)))
            except BaseException as error:
                found.put((place, error))
                return

    for _ in range(min(most, len(given))):
        threading.Thread(target=run, daemon=True).start()
    made: dict[int, _R] = {}
    while len(made) < len(given):
        place, result = found.get()
        if isinstance(result, BaseException):
            while not asked.empty():
                asked.get()
            raise result
        made[place] = result
    return [made[place] for place in range(len(given))]


def _clear(weights: Path) -> None:
    """Remove the folders of other versions, which no server reads any more."""
    for path in weights.parent.iterdir() if weights.parent.is_dir() else ():
        if path.name != weights.name and _FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
