"""Inference servers that generate for a run, as values: the section `[rollout]`, and each server's own words.

All of them answer OpenAI's completions. They differ in how they take weights from a folder, in how they tell which
weights they hold, and in the fields of a request that OpenAI does not define; `SERVERS` has these. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from terrace.base.errors import ConfigError, did_you_mean

ANSWERING = "sync/servers"  # metric: servers that answer
_LONGEST_S = 1e6  # 11 days, as of the other deadlines of a run
MOST_REQUESTS = 4096  # each has a thread and a connection


@dataclass(frozen=True, kw_only=True)
class Server:
    """The words of a server. In bodies, "{folder}" and "{version}" stand for the folder of weights and its version."""

    start: str  # a command that starts one
    load: tuple[tuple[str, Mapping[str, Any]], ...]  # paths and bodies of the POSTs that load a folder, in order
    version_path: str  # of a GET whose answer has the version of the weights as `weight_version`
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of a completion


# Read in vLLM 0.32 (entrypoints/rl/online/api_router.py, entrypoints/serve/dev) and in SGLang 0.5.23
# (srt/entrypoints/http_server.py).
SERVERS: Mapping[str, Server] = {
    "vllm": Server(
        start="VLLM_SERVER_DEV_MODE=1 vllm serve MODEL",
        load=(
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}),
            # Keys and values of the old weights.
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": "{version}"}),
        ),
        version_path="/weight_info",
        # Only the run's own tokens end a response. (SGLang would then also ignore `stop_token_ids`.)
        request={"ignore_eos": True},
    ),
    "sglang": Server(
        start="python -m sglang.launch_server --model-path MODEL",
        load=(
            (
                "/update_weights_from_disk",
                {"model_path": "{folder}", "weight_version": "{version}", "flush_cache": True},
            ),
        ),
        version_path="/model_info",
        request={"no_stop_trim": True},
    ),
}


@dataclass(frozen=True, kw_only=True)
class RolloutKeys:
    """What generates a run's responses: its own engine, or servers of another one that are reached over HTTP."""

    engine: Literal["own", "http"] = "own"  # http: inference servers that run already
    server: str = "vllm"  # whose words the servers speak: vllm or sglang
    urls: tuple[str, ...] = ()  # of the servers, such as http://node-7:8000; each draws a share
    requests: int = 64  # that a server has at once, shared by the ranks; at least one each
    deadline_s: float = 300.0  # of a response, and of loading weights; a server that takes longer is left out

    def __post_init__(self) -> None:
        if self.engine == "own":
            for name in ("server", "urls", "requests", "deadline_s"):
                if getattr(self, name) != getattr(RolloutKeys, name):
                    raise ConfigError(
                        f"rollout.{name} = {getattr(self, name)!r} has no effect under rollout.engine = 'own': leave "
                        "it out, or set rollout.engine = 'http'"
                    )
            return
        if self.server not in SERVERS:
            raise ConfigError(f"rollout.server = {self.server!r} is not known{did_you_mean(self.server, SERVERS)}")
        if not self.urls:
            raise ConfigError(
                "rollout.engine = 'http' needs rollout.urls, the addresses of its servers: give "
                'rollout.urls = ["http://HOST:PORT"]'
            )
        for url in self.urls:
            _check_url(url)
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError(f"rollout.urls = {list(self.urls)} names a server twice: name each once")
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise ConfigError(f"rollout.requests = {self.requests} must be from 1 to {MOST_REQUESTS}")
        if not 0 < self.deadline_s <= _LONGEST_S:
            raise ConfigError(f"rollout.deadline_s = {self.deadline_s} must be above 0 and at most {_LONGEST_S:g}")

    @property
    def is_served(self) -> bool:
        return self.engine == "http"

    @property
    def words(self) -> Server:
        return SERVERS[self.server]


def filled(body: Any, folder: str, version: str) -> Any:
    """`body` with "{folder}" and "{version}" replaced, wherever they are values."""
    if isinstance(body, Mapping):
        return {key: filled(value, folder, version) for key, value in body.items()}
    return {"{folder}": folder, "{version}": version}.get(body, body) if isinstance(body, str) else body


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"rollout.urls: {url!r} is no address of a server: give scheme, host and port alone, such as "
            "'http://node-7:8000'"
        )
