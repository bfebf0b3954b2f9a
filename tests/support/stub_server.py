"""A second implementation of an inference server: OpenAI's completions and the words of vLLM and of SGLang.

It shares nothing with Terrace but the protocol: a llama in plain torch, read from safetensors by the names of Hugging
Face, a sampler of its own, and Python's HTTP server. `faults` change its answers on purpose.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

Answer = dict[str, Any]


class Llama:
    """Logits of a llama without biases, in the dtype of its files."""

    def __init__(self, folder: Path) -> None:
        self.table = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.weights |= load_file(path)

    def logits(self, tokens: list[int]) -> Tensor:
        """After the last of the tokens, (V)."""
        table, of = self.table, self.weights
        heads, kv_heads = table["num_attention_heads"], table["num_key_value_heads"]
        x = of["model.embed_tokens.weight"][torch.tensor(tokens)]
        size = table.get("head_dim") or x.shape[-1] // heads
        frequencies = table["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.arange(len(tokens)).double()[:, None] * frequencies
        cos, sin = (each.repeat(1, 2).to(x.dtype) for each in (angles.cos(), angles.sin()))

        def turned(y: Tensor) -> Tensor:
            low, high = y.chunk(2, -1)
            found: Tensor = y * cos + torch.cat([-high, low], -1) * sin
            return found

        def normed(y: Tensor, name: str) -> Tensor:
            scale: Tensor = (y.square().mean(-1, keepdim=True) + table["rms_norm_eps"]).rsqrt()
            return y * scale * of[name]

        for layer in range(table["num_hidden_layers"]):
            base = f"model.layers.{layer}."
            y = normed(x, f"{base}input_layernorm.weight")
            q, k, v = (
                (y @ of[f"{base}self_attn.{name}_proj.weight"].mT).view(len(tokens), -1, size).transpose(0, 1)
                for name in "qkv"
            )
            k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
            mixed = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
            x = x + mixed.transpose(0, 1).flatten(1) @ of[f"{base}self_attn.o_proj.weight"].mT
            y = normed(x, f"{base}post_attention_layernorm.weight")
            gate, up, down = (of[f"{base}mlp.{name}_proj.weight"].mT for name in ("gate", "up", "down"))
            x = x + (silu(y @ gate) * (y @ up)) @ down
        head = of.get("lm_head.weight", of["model.embed_tokens.weight"])
        return normed(x[-1], "model.norm.weight") @ head.mT


class Stub:
    """A server on a port of its own. `faults` are called with the path and the answer, and may raise `FaultError`."""

    def __init__(self, max_model_len: int = 64) -> None:
        self.model: Llama | None = None
        self.version: str | None = "default"
        self.max_model_len = max_model_len
        self.faults: list[Callable[[str, Answer], Answer | None]] = []
        self.asked: list[tuple[str, Answer]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        """As when it is killed: nothing listens any more."""
        self._server.shutdown()
        self._server.server_close()

    def restarted(self) -> None:
        """As when a supervisor starts it again: with the weights of its start."""
        self.version = "default"

    def num(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    def _answer(self, path: str, body: Answer) -> Answer | None:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "max_model_len": self.max_model_len}]}
        if path in ("/weight_info", "/model_info"):
            return {"weight_version": self.version, "model_path": "tiny"}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self._load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        if path == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.version = body["weight_version"]
            return {"success": True, "message": "", "num_paused_requests": 0}
        if path == "/v1/completions":
            return self._completed(body)
        raise FaultError(404, "Not Found")

    def _load(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise FaultError(400, f"{folder} is no folder")
        self.model = Llama(Path(folder))

    def _completed(self, body: Answer) -> Answer:
        if body["model"] != "tiny" or self.model is None:
            raise FaultError(404, f"The model `{body['model']}` does not exist.")
        assert (body["logprobs"], body["top_p"], body["top_k"]) == (0, 1.0, -1)
        draws, tokens, logprobs = torch.Generator().manual_seed(body["seed"] % 2**63), list[int](), list[float]()
        finish = "length"
        with torch.no_grad():
            for _ in range(body["max_tokens"]):
                with self._lock:  # one product at a time
                    found = self.model.logits([*body["prompt"], *tokens]).double().log_softmax(-1)
                likeliest = int(found.argmax())
                drawn = int(torch.multinomial(found.exp(), 1, generator=draws)) if body["temperature"] else likeliest
                tokens.append(drawn)
                logprobs.append(float(found[drawn]))
                if drawn in body["stop_token_ids"]:
                    finish = "stop"
                    break
        of_tokens = {"token_logprobs": logprobs, "tokens": [f"token_id:{each}" for each in tokens]}
        choice = {"index": 0, "text": "", "finish_reason": finish, "logprobs": of_tokens}
        if body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
        return {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice]}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._do({})

            def do_POST(self) -> None:
                self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _do(self, body: Answer) -> None:
                stub.asked.append((self.path, body))
                try:
                    answer = stub._answer(self.path, body)
                    for fault in stub.faults:
                        answer = fault(self.path, answer or {}) or answer
                    status, text = 200, json.dumps(answer)
                except FaultError as fault:
                    status, text = fault.status, json.dumps({"error": {"message": fault.words, "code": fault.status}})
                except GoneError:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


class FaultError(Exception):
    """An answer with an error."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class GoneError(Exception):
    """The connection is closed without an answer."""


@contextmanager
def stubs(num: int = 1, **given: Any) -> Iterator[list[Stub]]:
    made = [Stub(**given) for _ in range(num)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def of_completions(change: Callable[[Answer], Answer | None]) -> Callable[[str, Answer], Answer | None]:
    """A fault of completions alone, given their one choice."""

    def fault(path: str, answer: Answer) -> Answer | None:
        if path != "/v1/completions":
            return None
        changed = change(answer["choices"][0])
        return None if changed is None else {**answer, "choices": [changed]}

    return fault


def slow(seconds: float) -> Callable[[str, Answer], None]:
    """Completions after so many seconds."""

    def fault(path: str, answer: Answer) -> None:
        time.sleep(seconds if path == "/v1/completions" else 0.0)

    return fault


def first(times: int, error: Exception) -> Callable[[str, Answer], None]:
    """The first completions fail."""
    left = iter(range(times))

    def fault(path: str, answer: Answer) -> None:
        if path == "/v1/completions" and next(left, math.inf) != math.inf:
            raise error

    return fault
