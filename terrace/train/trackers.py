"""Destinations of metrics besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, MLflow, OpenTelemetry.

    train.metrics = ["tensorboard", "wandb"]

Names are the same everywhere, with a slash after their kind: `train/loss`, `perf/tokens_per_s`, `time/forward`,
`bytes/node`, `memory/params`, `quantisation/sync`, `eval/holdout/loss`. Each package is imported only when requested,
on rank 0. A resumed run continues the same curves: ids assigned by a service are kept in `trackers.json` of the run
folder. Accounts, servers and offline modes are configured by the packages' own environment variables.
"""

import importlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.extras import install
from terrace.base.files import write_atomic
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_text
from terrace.base.sealed import sealed_json
from terrace.train.metrics import StepRecord, eval_figures

_PROJECT = "terrace"
_IDS = "trackers.json"
_MLFLOW_PARAMS_A_CALL = 100  # limit of its server
_MLFLOW_VALUE_LENGTH = 500
_OTEL_NAME_LENGTH = 255  # of an instrument, https://opentelemetry.io/docs/specs/otel/metrics/api/
_OTEL_END_MS = 5_000  # how long the end of a run waits for a receiver
# Name of a tracker -> its module and its package, where these differ from the name
_PACKAGES = {"opentelemetry": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http")}

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Tracker:
    """`log` sends the values of a step, `write` sends Markdown under a name, `close` flushes what is still buffered."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], object]
    write: Callable[[str, str, int], object] = lambda name, text, step: None  # services without texts get none


def check_names(names: Sequence[str], key: str = "train.metrics") -> None:
    """Raises `ConfigError` for an unknown or duplicate tracker name in `key`."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"{key} names {name!r}{did_you_mean(name, TRACKERS)}")
        if names.count(name) > 1:
            raise ConfigError(f"{key} names {name!r} twice: keep one of them")


def check_installed(names: Sequence[str], key: str = "train.metrics") -> None:
    """Raises `ConfigError` for a package that is not installed, with the command to install it."""
    for name in names:
        module, package = _PACKAGES.get(name, (name, name))
        if not _is_installed(module):
            raise ConfigError(f"{key} names {name!r}, which is not installed: {install(package)}")


def _is_installed(module: str) -> bool:
    # Found without importing it: a package may take seconds to import. Of a dotted name, outer ones are imported.
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def values_of(record: StepRecord) -> dict[str, float]:
    """A step's values for trackers, by name."""
    values: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.learning_rate,
        "train/loss_scale": record.loss_scale,
        "train/tokens": record.num_tokens,
        "perf/tokens_per_s": record.tokens_per_s,
        "perf/tokens_per_s_per_device": record.tokens_per_s_per_device,
        "perf/step_s": record.step_s,
        "perf/mfu": record.mfu,
        "perf/hfu": record.hfu,
        "perf/balance": record.balance,
    }
    tables: dict[str, Mapping[str, float]] = {
        "time": record.time_s,
        "bytes": record.sent_bytes,
        "memory": record.memory_bytes | {f"peak_{name}": size for name, size in record.peak_memory_bytes.items()},
        "quantisation": record.quantisation_error,
        "router": record.router_losses | ({} if record.dropped is None else {"dropped": record.dropped}),
        "pairs": record.pairs,
        "teacher": record.teacher,
        "further_tokens": record.further_tokens,
        "load": record.load,
        "outer": {f"{each}_{name}": value for each, row in record.outer.items() for name, value in row.items()},
        "eval": {
            f"{source}/{name}": value for source, row in eval_figures(record).items() for name, value in row.items()
        },
        "slow": {f"rank_{rank}": factor for rank, factor in record.slow_ranks.items()},
    }
    for kind, table in tables.items():
        values |= {f"{kind}/{name.replace(' ', '_')}": value for name, value in table.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def open_trackers(names: Sequence[str], folder: Path, config: Config, first_step: int) -> dict[str, Tracker]:
    """Opens the trackers of a run folder, continuing after `first_step`.

    `config` is the run's table, which services show with its curves. Raises `ConfigError` for a tracker that cannot
    start.
    """
    check_installed(names)
    found: dict[str, Tracker] = {}
    for name in names:
        try:
            found[name] = TRACKERS[name](folder, config, first_step)
        except Exception as error:  # whatever a package raises: no account, no server, no room
            raise ConfigError(
                f"train.metrics names {name!r}, which cannot start: {type(error).__name__}: {error}; set it up, or "
                "leave it out"
            ) from error
    return found


def _tensorboard(folder: Path, config: Config, first_step: int) -> Tracker:
    # A resumed run repeats steps after its checkpoint, so their earlier points are purged.
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None
    )
    writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", first_step)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close, writer.add_text)


def _wandb(folder: Path, config: Config, first_step: int) -> Tracker:
    known, name = _ids(folder).get("wandb"), folder.resolve().name
    # The kept id continues the same curves; the service drops steps that it has already.
    resume = "allow" if known else None
    run = importlib.import_module("wandb").init(
        name=name, dir=str(folder), config=dict(config), id=known, resume=resume
    )
    _keep_id(folder, "wandb", str(run.id))
    return Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


def _trackio(folder: Path, config: Config, first_step: int) -> Tracker:
    trackio = importlib.import_module("trackio")
    # The run's name identifies it, so no id is kept.
    trackio.init(project=_PROJECT, name=folder.resolve().name, config=dict(config), resume="allow")
    return Tracker(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


def _mlflow(folder: Path, config: Config, first_step: int) -> Tracker:
    mlflow, kept = importlib.import_module("mlflow"), _ids(folder)
    known, place = kept.get("mlflow"), kept.get("mlflow_place")
    # MLflow's default place is in the working directory, and a run may go on from another. What its user says now wins.
    if known is not None and place is not None and not mlflow.is_tracking_uri_set():
        mlflow.set_tracking_uri(place)
    # MLflow refuses parameters that change, so they are logged once, at the first start.
    if known is None:
        run = mlflow.start_run(run_name=folder.resolve().name)
        flat = list(_flat(config).items())
        for start in range(0, len(flat), _MLFLOW_PARAMS_A_CALL):
            mlflow.log_params(dict(flat[start : start + _MLFLOW_PARAMS_A_CALL]))
    else:
        run = mlflow.start_run(run_id=known)
    _keep_id(folder, "mlflow", str(run.info.run_id))
    _keep_id(folder, "mlflow_place", _absolute_place(str(mlflow.get_tracking_uri())))
    return Tracker(lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def _opentelemetry(folder: Path, config: Config, first_step: int) -> Tracker:
    metrics = importlib.import_module("opentelemetry.sdk.metrics")
    exporting = importlib.import_module("opentelemetry.sdk.metrics.export")
    exporter = importlib.import_module(f"{_PACKAGES['opentelemetry'][0]}.metric_exporter").OTLPMetricExporter()
    resources = importlib.import_module("opentelemetry.sdk.resources")
    resource = resources.Resource.create({"terrace.run": folder.resolve().name})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # the user has named none
        resource = resource.merge(resources.Resource({"service.name": _PROJECT}))
    # A thread of the reader sends the newest value of every gauge, by default once a minute.
    reader = exporting.PeriodicExportingMetricReader(exporter)
    provider = metrics.MeterProvider([reader], resource, shutdown_on_exit=False)
    meter, gauges, first = provider.get_meter(_PROJECT), dict[str, Any](), iter((True,))
    # The package reports each attempt to reach a receiver that is gone; the first report says it all.
    logging.getLogger(type(exporter).__module__).addFilter(lambda record: next(first, False))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in {**values, "train/step": step}.items():
            if name not in gauges:
                gauges[name] = meter.create_gauge(re.sub(r"[^\w./-]", "_", name, flags=re.ASCII)[:_OTEL_NAME_LENGTH])
            gauges[name].set(value)

    return Tracker(log, lambda: provider.shutdown(_OTEL_END_MS))  # which sends the last values


def _absolute_place(place: str) -> str:
    """Makes a tracking URI independent of the working directory."""
    # sqlite:///FILE, as SQLAlchemy writes a relative one; file:FOLDER; FOLDER. Servers stay as they are.
    found = re.fullmatch(r"(sqlite:///|file:(?!/)|(?![\w+.-]+:))(.*)", place, re.DOTALL)
    return place if found is None else f"{found[1]}{os.path.abspath(found[2])}"


TRACKERS: dict[str, Callable[[Path, Config, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
    "opentelemetry": _opentelemetry,
}


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = str(value)[:_MLFLOW_VALUE_LENGTH]
    return found


def _ids(folder: Path) -> dict[str, str]:
    try:
        table = parse_table(read_text(folder / _IDS, folder))
    except OSError:
        return {}
    except ValueError as error:
        print(f"terrace: {folder / _IDS} is damaged ({error}): trackers begin a new run", file=sys.stderr, flush=True)
        (folder / _IDS).unlink()
        return {}
    return {name: value for name, value in table.items() if isinstance(value, str)}


def _keep_id(folder: Path, name: str, value: str) -> None:
    write_atomic(folder / _IDS, sealed_json(json.dumps(_ids(folder) | {name: value})))
