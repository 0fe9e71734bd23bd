"""Prints the lowest versions of mlx and mlx-lm that pyproject.toml allows, as pip's constraints."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", requirement).groups()
    if name.split("-")[0] == "mlx":
        print(f"{name}=={least}")
