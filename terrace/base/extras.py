"""Optional packages, and the extra that installs each.

The distribution is not called `terrace`, because that name on the package index is taken. Terrace itself is not on the
index, so the commands here install from the running checkout, or else name the packages of the extra.
"""

import re
from pathlib import Path

DISTRIBUTION = "terrace-train"
EXTRAS = {
    "torch": "train",
    "numpy": "train",
    "safetensors": "train",
    "tokenizers": "hf",
    "jinja2": "hf",
    "huggingface_hub": "hub",
    "pyarrow": "data",
    "pyyaml": "data",
    "tensorboard": "metrics",
    "opentelemetry-exporter-otlp-proto-http": "otel",
    "ray": "ray",
    "liger-kernel": "liger",
}


def install(package: str, checkout: Path = Path(__file__).parents[2]) -> str:
    """Shell command that installs `package` with its extra; `checkout` is the folder of this code."""
    extra = EXTRAS.get(package)
    if extra is None:
        return f"pip install {package}"
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    return f"pip install {' '.join(_packages(extra)) or package}"


def _packages(extra: str) -> list[str]:
    """Requirements of an extra in an installed wheel, quoted for a shell."""
    # Imported here alone, with all that reads e-mail: most commands miss nothing.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        found = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a copy of the package's folder alone
        return []
    parts = [each.partition(";") for each in found]
    names = [name.strip() for name, _, when in parts if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", when)]
    of_extras = [re.match(rf"{re.escape(DISTRIBUTION)}\[(.+)\]", name) for name in names]
    # An extra may bring another one.
    return [
        each
        for name, other in zip(names, of_extras, strict=True)
        for each in (_packages(other[1]) if other else [f"'{name}'"])
    ]


def needs(package: str) -> str:
    """Error text for a missing package, with the command that installs it."""
    return f"needs the package {package!r}: {install(package)}"
