"""Resolve each extra of a wheel against the registry, for every platform and Python that it is for: what pip would find there.

Run with the path of uv, which resolves for platforms other than its own: ``python extras.py UV WHEEL``. Nothing is
installed, and only wheels count: whoever installs oarlock needs no compiler.
"""

import itertools
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from pathlib import Path

PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_35",
    "Linux arm64": "aarch64-manylinux_2_35",
    "macOS 14 arm64": "aarch64-apple-darwin",
}
MACOS = "14.0"
"""The oldest that MLX has wheels for."""
METAL = "mlx-metal"
BACKENDS = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}
"""The distribution that an extra brings on Linux; on macOS it brings nothing, and `METAL` comes without one."""


def main(uv: str, wheel: Path) -> None:
    bad = 0
    extras, pythons = described(wheel)
    cases = list(itertools.product(["", *extras], PLATFORMS, pythons))
    with ThreadPoolExecutor(8) as pool:  # each waits for the registry
        answers = pool.map(lambda case: resolved(uv, wheel, *case), cases)
    for (extra, title, python), (found, said) in zip(cases, answers, strict=True):
        wrong = [said] if said else list(misses(found, extra, title))
        bad += bool(wrong)
        backend = ", ".join(sorted(found & {METAL, *BACKENDS.values()})) or "no backend"
        line = f"{f'oarlock[{extra}]' if extra else 'oarlock':18} {title:15} Python {python}"
        print(f"{line}  {f'{len(found)} distributions, {backend}' if not wrong else 'FAILS: ' + '; '.join(wrong)}")
    if bad:
        sys.exit(f"{bad} of them fail")


def described(wheel: Path) -> tuple[list[str], list[str]]:
    """Return the extras of a wheel, and the lowest and highest Python that its classifiers name."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(opened.read(name))
    named = [re.fullmatch(r".* :: (3\.\d+)", text) for text in metadata.get_all("Classifier")]
    pythons = sorted((match[1] for match in named if match), key=lambda version: int(version.split(".")[1]))
    return metadata.get_all("Provides-Extra"), [pythons[0], pythons[-1]]


def resolved(uv: str, wheel: Path, extra: str, title: str, python: str) -> tuple[set[str], str]:
    """Return the names of all distributions that come, or what is wrong."""
    command = [uv, "pip", "compile", "-", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python-platform", PLATFORMS[title], "--python-version", python]
    asked = f"oarlock{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run(command, input=asked, env=environment, check=False, capture_output=True, text=True)
    names = {re.split(r"[ =@;]", line)[0] for line in done.stdout.splitlines() if line and not line.startswith("#")}
    return (names, "") if done.returncode == 0 else (set(), " ".join(done.stderr.split()))


def misses(found: set[str], extra: str, title: str) -> Iterator[str]:
    """Yield what should have come and did not, or came and should not."""
    backend = METAL if title.startswith("macOS") else BACKENDS.get(extra)
    wanted = {backend} if backend else set()
    if (came := found & {METAL, *BACKENDS.values()}) != wanted:
        yield f"the backends {sorted(came)} and not {sorted(wanted)}"
    if not {"oarlock", "mlx", "mlx-lm"} <= found:
        yield f"only {sorted(found)}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
