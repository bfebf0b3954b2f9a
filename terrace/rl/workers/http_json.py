"""One exchange with a server over HTTP, in JSON, with a deadline. Needs no torch, and no package but Python's own."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from terrace.base.errors import TrainingError
from terrace.base.parsing import parse_json

_MOST_BYTES = 64 << 20  # of an answer; a response of 100,000 tokens has 10 MB
_SHOWN = 300  # characters of a server's own words
_MAY_PASS = (408, 429)  # statuses below 500 of which another attempt may be without


class UnansweredError(Exception):
    """A server gave no answer that counts, but may when it is asked again; `is_late`: it exceeded the deadline."""

    def __init__(self, words: str, *, is_late: bool = False) -> None:
        super().__init__(words)
        self.is_late = is_late


def exchange(url: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
    """POST `body`, or GET without one. Returns the parsed answer, None if it is empty.

    Raises `UnansweredError` where another attempt may succeed, and `TrainingError` if the server refuses the request or
    its answer is no JSON.
    """
    content = None if body is None else json.dumps(body).encode()
    request = Request(url.rstrip("/") + path, data=content, headers={"Content-Type": "application/json"})
    try:
        with _opener().open(request, timeout=deadline_s) as answer:
            text = answer.read(_MOST_BYTES + 1)
    except HTTPError as error:
        words = f"{error.code} for {path}: {_own_words(error)}"
        if error.code < 500 and error.code not in _MAY_PASS:
            raise TrainingError(f"rollout server {url} answered {words}") from error
        raise UnansweredError(words) from error
    except TimeoutError as error:
        raise UnansweredError(f"no answer for {path} within {deadline_s:g} s", is_late=True) from error
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise UnansweredError(f"no answer for {path} within {deadline_s:g} s", is_late=True) from error
        raise UnansweredError(f"{getattr(error.reason, 'strerror', None) or error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnansweredError(f"{getattr(error, 'strerror', None) or type(error).__name__} for {path}") from error
    if len(text) > _MOST_BYTES:
        raise TrainingError(f"rollout server {url} answered {path} with more than {_MOST_BYTES >> 20} MiB")
    try:
        return parse_json(text) if text.strip() else None
    except ValueError as error:
        raise TrainingError(f"rollout server {url} answered {path} with what is no JSON: {_cut(text)}") from error


def _opener() -> OpenerDirector:
    # Without the proxies of the environment, which are for other machines than those of a cluster.
    return build_opener(ProxyHandler({}))


def _own_words(error: HTTPError) -> str:
    try:
        text = error.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        found = parse_json(text)
    except ValueError:
        return _cut(text) or str(error.reason)
    # vLLM and SGLang have {"error": {"message"}}, {"message"} or {"detail"}.
    for key in ("error", "message", "detail"):
        found = found[key] if isinstance(found, dict) and key in found else found
    return _cut(str(found).encode()) or str(error.reason)


def _cut(text: bytes) -> str:
    line = " ".join(text[: 4 * _SHOWN].decode(errors="replace").split())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."
