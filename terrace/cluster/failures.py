"""How often the parts of a cluster fail, `[failures]` of its file. docs/failures.md has the equations."""

import math
from dataclasses import dataclass

_HOUR_S = 3600.0
_LONGEST_S = 1e12  # as for all seconds of a cluster
MOST_SPARES = 10_000
REPAIR_HOURS = 24.0  # an assumption: a technician comes once a day


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Mean times between failures, which arrive at random, and what follows one. By default nothing fails."""

    device_hours: float | None = None  # mean time between failures of one device; None: devices do not fail
    machine_hours: float | None = None  # and of what the devices of a machine share
    restart_s: float = 0.0  # from a failure until steps run again, on a machine that stands by
    spares: int | None = None  # machines that stand by, beyond those of the tiers; None: one always does
    repair_hours: float = REPAIR_HOURS  # until a machine that failed stands by again

    @property
    def are_known(self) -> bool:
        return self != NO_FAILURES

    @property
    def repair_s(self) -> float:
        return self.repair_hours * _HOUR_S

    def mean_s(self, num_devices: int, num_machines: int) -> float:
        """Mean seconds between failures of a job: any part that fails stops all of it. Infinite if nothing fails."""
        counts = ((num_devices, self.device_hours), (num_machines, self.machine_hours))
        per_hour = sum(number / hours for number, hours in counts if hours is not None)
        return _HOUR_S / per_hour if per_hour else math.inf

    def restarts_prevail(self, num_devices: int, num_machines: int) -> str:
        """Why a job of this size would spend most of its time on restarts, and the remedy; "" if it would not."""
        mean_s = self.mean_s(num_devices, num_machines)
        if mean_s >= self.restart_s:
            return ""
        return (
            f"cluster.failures: of {num_devices} devices on {num_machines} machines one fails every {mean_s:.3g} s, "
            f"sooner than restart_s = {self.restart_s:g} is over, so restarts would take longer than all work between "
            "them: give hours of one device or machine (not of the whole cluster), a shorter restart_s, or fewer nodes"
        )


NO_FAILURES = Failures()


def wrong_failures(failures: Failures) -> str:
    """What is wrong with the table, and the fix; "" if nothing is."""
    if not failures.are_known:
        return ""
    for name in ("device_hours", "machine_hours", "repair_hours"):
        hours = getattr(failures, name)
        if hours is not None and not 0 < hours * _HOUR_S <= _LONGEST_S:
            return (
                f"failures.{name} = {hours} must be positive and at most {_LONGEST_S / _HOUR_S:.3g}: give hours, or "
                "leave it out"
            )
    if failures.device_hours is None and failures.machine_hours is None:
        return "failures has no effect without hours: give device_hours, machine_hours or both"
    if not 0 < failures.restart_s <= _LONGEST_S:
        return (
            f"failures.restart_s = {failures.restart_s:g} must be positive and at most {_LONGEST_S:g}: give the "
            "seconds from a failure until steps run again"
        )
    if failures.spares is None:
        if failures.repair_hours != REPAIR_HOURS:
            return (
                f"failures.repair_hours = {failures.repair_hours:g} has no effect without failures.spares, as a "
                "machine always stands by: give a number of spares, 0 for none"
            )
    elif not 0 <= failures.spares <= MOST_SPARES:
        return (
            f"failures.spares = {failures.spares} must be a number of machines from 0 to {MOST_SPARES}: leave it out "
            "where one always stands by"
        )
    return ""
