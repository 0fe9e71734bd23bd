"""Check an installed wheel from outside the checkout: packages, types, entry points and the command line.

Run with the Python of a fresh environment, isolated: ``python -I check_wheel.py WHEEL SOURCE``.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

BANKS = ("core", "layouts", "methods", "plugins", "samplers")


def main(wheel: Path, source: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = sorted(
        init.parent.relative_to(source) for bank in BANKS for init in (source / bank).rglob("__init__.py")
    )
    files = [path.relative_to(source) for bank in BANKS for path in (source / bank).rglob("*") if path.is_file()]
    for file in [path for path in files if "__pycache__" not in path.parts] + [path / "py.typed" for path in packages]:
        assert f"oarlock/{file}" in names, f"{wheel.name} has no {file}"
    strangers = {name.split("/")[0] for name in names} - {"oarlock"}
    assert all(name.endswith(".dist-info") for name in strangers), f"{wheel.name} brings top-level names: {strangers}"

    kit = Path("core", "testing")  # whose parts need the extra of that name
    for package in [package for package in packages if kit not in package.parents]:
        importlib.import_module(".".join(("oarlock", *package.parts)))
    for bank in BANKS:
        assert bank not in sys.modules, f"{bank} was imported as a top-level module"
        assert importlib.util.find_spec(bank) is None, f"{bank} can be imported as a top-level module"
    for entry in importlib.metadata.entry_points(group="oarlock"):
        entry.load()

    listing = "no command line yet"
    if importlib.util.find_spec("oarlock.plugins.cli") is not None:
        program = Path(sys.executable).with_name("oarlock")
        answer = subprocess.run([program, "plugins", "--json"], check=True, capture_output=True, text=True).stdout
        listing = f"oarlock plugins --json lists {len(json.loads(answer))} plugins"
    print(f"{wheel.name}: {len(packages)} packages imported from {Path(sys.prefix).name}; {listing}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
