"""Metrics over OTLP: a receiver that the test serves gets a step's figures, and one that is not there costs nothing."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from terrace.train.metrics import StepRecord
from terrace.train.trackers import open_trackers, values_of

metrics_service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    reason="pip install opentelemetry-exporter-otlp-proto-http",
)

RECORD = StepRecord(
    step=3,
    loss=2.5,
    grad_norm=1.0,
    learning_rate=0.1,
    num_tokens=128,
    step_s=0.5,
    tokens_per_s=256.0,
    time_s={"wait gather": 0.3},
    sent_bytes={"node": 10},
    eval={"größe: 1": {"loss": 2.0, "tokens": 8.0}},
)


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a receiver, and the bodies of its requests."""
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_receiver_gets_the_figures_of_a_step_under_the_names_of_all_trackers(
    received: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, bodies = received
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    tracker = open_trackers(["opentelemetry"], tmp_path, {}, 0)["opentelemetry"]
    tracker.log(values_of(RECORD) | {"train/loss": 9.0}, 2)
    tracker.log(values_of(RECORD), 3)
    tracker.close()
    request = metrics_service.ExportMetricsServiceRequest.FromString(bodies[0])
    (of_run,) = request.resource_metrics
    about = {each.key: each.value.string_value for each in of_run.resource.attributes}
    assert (about["service.name"], about["terrace.run"]) == ("terrace", tmp_path.name)
    found = {
        each.name: each.gauge.data_points[0].as_double or each.gauge.data_points[0].as_int
        for scope in of_run.scope_metrics
        for each in scope.metrics
    }
    renamed = {"eval/größe:_1/loss": "eval/gr__e__1/loss"}
    wanted = {renamed.get(name, name): value for name, value in values_of(RECORD).items() if "größe" not in name}
    assert wanted.items() <= found.items()
    assert (found["train/step"], found["eval/gr__e__1/loss"]) == (3, 2.0)


def test_a_receiver_that_is_not_there_neither_slows_a_step_nor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    tracker = open_trackers(["opentelemetry"], tmp_path, {}, 0)["opentelemetry"]
    begun_s, values = time.thread_time(), values_of(RECORD)
    for step in range(1_000):
        tracker.log(values, step)
    assert time.thread_time() - begun_s < 1.0, "a step waits for nobody"
    time.sleep(0.3)  # an export has failed by now
    begun_s = time.monotonic()
    tracker.close()
    assert time.monotonic() - begun_s < 20
