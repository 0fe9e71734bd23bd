"""Check an sdist, and the wheel made of it, against the checkout: their files byte by byte, and their metadata.

Run with a Python that has `packaging`: ``python check_dist.py FOLDER SOURCE``. Whether the wheel runs is check_wheel.py's business.
"""

import configparser
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement

BANKS = ("core", "layouts", "methods", "plugins", "samplers")
NEEDED = (
    "summary", "description", "description_content_type", "requires_python", "license_expression", "license_files",
    "keywords", "classifiers",
)  # fmt: skip


def main(folder: Path, source: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    if found := list(faults(sdist, wheel, source)):
        sys.exit("\n".join(found))
    print(f"{sdist.name} and {wheel.name}: {len(files_of(source))} files each as in the checkout, metadata whole")


def faults(sdist: Path, wheel: Path, source: Path) -> Iterator[str]:
    """Yield a line for each file that is missing, strange or another than in the checkout, and for each flaw of the metadata."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    stem = f"{project['name']}-{project['version']}"
    ours = files_of(source)
    beside = {name: (source / name).read_bytes() for name in ("LICENSE", "README.md", "pyproject.toml")}
    packed, made = contents(sdist), contents(wheel)
    tools = (f"{stem}/PKG-INFO", f"{stem}/setup.cfg", f"{stem}/{project['name']}.egg-info/")
    yield from differences(
        sdist.name, packed, {f"{stem}/{name}": data for name, data in (ours | beside).items()}, tools
    )
    info = f"{stem}.dist-info"
    wanted = {f"{project['name']}/{name}": data for name, data in ours.items()}
    wanted[f"{info}/licenses/LICENSE"] = beside["LICENSE"]
    yield from differences(wheel.name, made, wanted, (f"{info}/",))
    for archive, data in ((sdist, packed.get(f"{stem}/PKG-INFO")), (wheel, made.get(f"{info}/METADATA"))):
        yield from (f"{archive.name}: {line}" for line in flaws(data or b"", project, beside["README.md"].decode()))
    found = configparser.ConfigParser(delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment]  # names keep their case
    found.read_string(made.get(f"{info}/entry_points.txt", b"").decode())
    points = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    if {group: dict(found[group]) for group in found.sections()} != points:
        yield f"{wheel.name}: its entry points are not those of pyproject.toml"


def files_of(source: Path) -> dict[str, bytes]:
    """Return what the five packages hold, by path in the checkout."""
    paths = [path for bank in BANKS for path in (source / bank).rglob("*")]
    kept = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in kept}


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened if member.isfile()}


def differences(
    name: str, found: Mapping[str, bytes], wanted: Mapping[str, bytes], tools: tuple[str, ...]
) -> Iterator[str]:
    """Yield what is not as wanted; files under ``tools`` are the build tool's own."""
    for path in sorted(found.keys() | wanted.keys()):
        if path not in found:
            yield f"{name} has no {path}"
        elif path not in wanted and not path.startswith(tools):
            yield f"{name} brings {path}, which is no part of it"
        elif path in wanted and found[path] != wanted[path]:
            yield f"{name} has another {path} than the checkout"


def flaws(data: bytes, project: Mapping, readme: str) -> Iterator[str]:
    """Yield what is invalid, missing, or other than pyproject.toml says."""
    try:
        metadata = Metadata.from_email(data, validate=True)
    except ExceptionGroup as group:
        yield from (str(error) for error in group.exceptions)
        return
    yield from (f"no {field.replace('_', ' ')}" for field in NEEDED if not getattr(metadata, field))
    if (metadata.name, str(metadata.version)) != (project["name"], project["version"]):
        yield f"{metadata.name} {metadata.version} and not {project['name']} {project['version']}"
    if (metadata.description or "").strip() != readme.strip():
        yield "the description is not README.md"
    wanted = required(project)
    found = {_plain(requirement) for requirement in metadata.requires_dist or ()}
    yield from (f"does not require {requirement}" for requirement in sorted(wanted - found))
    yield from (f"requires {requirement}" for requirement in sorted(found - wanted))
    if set(metadata.provides_extra or ()) != set(project.get("optional-dependencies", {})):
        yield f"has the extras {metadata.provides_extra}"


def required(project: Mapping) -> set[str]:
    """Return every requirement as metadata has it: those of an extra with a marker that names it."""
    wanted = {_plain(Requirement(text)) for text in project.get("dependencies", ())}
    for extra, texts in project.get("optional-dependencies", {}).items():
        wanted |= {_plain(Requirement(f'{text}; extra == "{extra}"')) for text in texts}
    return wanted


def _plain(requirement: Requirement) -> str:
    return str(requirement).replace('"', "'")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
