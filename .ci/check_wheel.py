"""Check an installed wheel from outside the checkout: packages, types, entry points and the command line.

Run with the Python of a fresh environment, isolated: ``python -I check_wheel.py SOURCE``. Which files the wheel holds is
check_dist.py's business.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

BANKS = ("core", "layouts", "methods", "plugins", "samplers")


def main(source: Path) -> None:
    packages = sorted(
        init.parent.relative_to(source) for bank in BANKS for init in (source / bank).rglob("__init__.py")
    )
    kit = Path("core", "testing")  # whose parts need the extra of that name
    for package in [package for package in packages if kit not in package.parents]:
        importlib.import_module(".".join(("oarlock", *package.parts)))
    for bank in BANKS:
        assert bank not in sys.modules, f"{bank} was imported as a top-level module"
        assert importlib.util.find_spec(bank) is None, f"{bank} can be imported as a top-level module"
    for entry in importlib.metadata.entry_points(group="oarlock"):
        entry.load()

    program = Path(sys.executable).with_name("oarlock")
    answer = subprocess.run([program, "plugins", "--json"], check=True, capture_output=True, text=True).stdout
    print(f"{Path(sys.prefix).name}: {len(packages)} packages imported; {len(json.loads(answer))} plugins listed")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
