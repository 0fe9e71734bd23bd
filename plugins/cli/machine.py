"""What this process computes with: the device, the BLAS that MLX calls, and what sixteen rows cost beside one."""

from __future__ import annotations

import ctypes
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
SYMBOL = "cblas_sgemm"
"""The product of float32 matrices, which MLX calls on the CPU."""

# Where distributions keep an OpenBLAS that stands in for cblas when it is preloaded, the better ones first.
OPENBLAS = (
    "lib/*/openblas-pthread/libopenblas.so.0",
    "lib/*/openblas-openmp/libopenblas.so.0",
    "lib/*/libopenblas.so.0",
    "lib64/libopenblasp.so.0",
    "lib64/libopenblas.so.0",
    "lib/libopenblas.so.0",
    "lib/libopenblas.so",
)

FAMILIES = (
    ("openblas", "OpenBLAS"),
    ("mkl", "MKL"),
    ("blis", "BLIS"),
    ("atlas", "ATLAS"),
    ("nvpl", "NVPL"),
    ("armpl", "Arm Performance Libraries"),
    ("blas", "the reference BLAS"),
)
REFERENCE = FAMILIES[-1][1]

SIZE = 2048  # rows and columns of the matrix that is timed
REPEATS = 9


def mapped(maps: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first address, address after the last, path) for each mapped file in the text of /proc/self/maps."""
    for line in maps.splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+(/.*)", line)
        if match:
            yield int(match[1], 16), int(match[2], 16), match[3].removesuffix(" (deleted)")


def blas_library() -> str | None:
    """Return the path of the library whose products MLX calls; None where that cannot be seen.

    Symbols are looked up as the loader does it: preloaded libraries first, then those that MLX links.
    """
    if not MAPS.exists():
        return None
    files = list(mapped(MAPS.read_text(encoding="utf-8", errors="replace")))
    mlx = next((path for _, _, path in files if Path(path).name.startswith("libmlx.")), None)
    for library in (None, mlx):
        try:
            function = getattr(ctypes.CDLL(library), SYMBOL)
        except (OSError, AttributeError):
            continue
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        for first, end, path in files:
            if first <= address < end:
                return path
    return None


def family(path: str) -> str:
    """Return the name of the BLAS in a file, from the file's name and that of its directory."""
    name = "/".join(Path(path).parts[-2:]).lower()
    return next((family for part, family in FAMILIES if part in name), "an unknown BLAS")


def openblas(root: Path = Path("/usr")) -> str | None:
    """Return an installed OpenBLAS that can be preloaded."""
    return next((str(path) for pattern in OPENBLAS for path in sorted(root.glob(pattern))), None)


def preload_advice() -> str:
    """Say how to make products fast where MLX calls the reference BLAS."""
    found = openblas()
    if found is None:
        return "install OpenBLAS (Debian, Ubuntu: sudo apt install libopenblas0-pthread), then run oarlock doctor again"
    return f"start it with OpenBLAS: LD_PRELOAD={found} oarlock ..."


def device() -> str:
    """Return MLX's default device, with the name of the chip where MLX knows it."""
    import mlx.core as mx

    name = mx.device_info().get("device_name", "")
    return f"{mx.default_device().type.name}{f' ({name})' if name else ''}"


def rows_ratio() -> tuple[float, float]:
    """Return milliseconds of a product with 16 rows, and how many times one row that is; medians, taken in turns."""
    import mlx.core as mx

    weight = mx.random.normal((SIZE, SIZE))
    times: dict[int, list[float]] = {1: [], 16: []}
    inputs = {rows: mx.random.normal((rows, SIZE)) for rows in times}
    mx.eval(weight, *inputs.values())
    for repeat in range(REPEATS + 1):
        for rows, x in inputs.items():
            start = time.perf_counter()
            mx.eval(x @ weight)
            if repeat:  # the first warms up
                times[rows].append(time.perf_counter() - start)
    one, sixteen = (statistics.median(times[rows]) for rows in (1, 16))
    return 1e3 * sixteen, sixteen / one


def on_linux_cpu() -> bool:
    """Whether products run through a BLAS that can be another."""
    import mlx.core as mx

    return sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu
