"""The address of a Ray cluster as `terrace rl --ray` takes it, checked without Ray."""

from terrace.base.errors import ConfigError

AUTO = "auto"  # the cluster of this machine
_PORTS = range(1, 1 << 16)


def check_address(address: str) -> None:
    """Raise `ConfigError` for an address at which a controller cannot join a cluster."""
    if address == AUTO:
        return
    form = "give HOST:PORT of its head, such as 10.0.0.1:6379, or auto for the cluster of this machine"
    if "://" in address:
        raise ConfigError(
            f"--ray {address!r} is for Ray's client, and the controller of a run is a process of the cluster: {form}"
        )
    host, _, port = address.rpartition(":")
    # An IPv6 host has brackets.
    is_name = bool(host) and not any(each in host for each in "/@ \t\n") and (":" not in host or host[0] == "[")
    if not is_name or not (port.isascii() and port.isdecimal()) or int(port) not in _PORTS:
        raise ConfigError(f"--ray {address!r} is no address of a Ray cluster: {form}")
