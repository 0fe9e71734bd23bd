"""The tree: what stands at the top, and that every package reaches the wheel."""

import tomllib

TOP = {
    ".ci", ".gitignore", ".typing", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "benchmarks",
    "core", "docs", "examples", "layouts", "methods", "plugins", "pyproject.toml", "samplers", "tests",
}  # fmt: skip
BANKS = ("core", "layouts", "methods", "plugins", "samplers")


def packages_of(root):
    """Dotted names of every directory of the five banks that has an __init__.py."""
    inits = (init for bank in BANKS for init in (root / bank).rglob("__init__.py"))
    return {".".join(("oarlock", *init.parent.relative_to(root).parts)) for init in inits}


def test_nothing_else_stands_at_the_top(tracked):
    """The design names what stands at the top level, and nothing else does."""
    assert {name.split("/")[0] for name in tracked} - TOP == set()


def test_no_package_is_called_oarlock(root):
    """The namespace is shared: an __init__.py in it would hide everybody else's part."""
    assert not (root / "oarlock").exists()
    assert not (root / ".typing" / "oarlock" / "__init__.py").exists()


def test_every_package_stands_in_pyproject(root):
    """An editable install hides a package that the wheel would miss."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_of(root)
    assert settings["package-dir"] == {f"oarlock.{bank}": bank for bank in BANKS}


def test_every_package_carries_its_type_marker(root):
    """A type checker reads py.typed from the package that it looks at."""
    bare = [name for name in packages_of(root) if not (root.joinpath(*name.split(".")[1:]) / "py.typed").exists()]
    assert bare == []


def test_the_type_checker_sees_the_namespace(root):
    """.typing/oarlock holds one relative link for each bank and nothing else."""
    links = {link.name: link for link in (root / ".typing" / "oarlock").iterdir()}
    assert set(links) == set(BANKS)
    for bank, link in links.items():
        assert link.is_symlink()
        assert str(link.readlink()) == f"../../{bank}"


def test_entry_points_name_modules_that_exist(root):
    """The built-in banks are found through our own entry points, like anyone's."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    targets = {**project["entry-points"]["oarlock"], **project["entry-points"]["pytest11"]}
    for name, target in targets.items():
        parts = target.split(":")[0].split(".")
        assert parts[0] == "oarlock", name
        path = root.joinpath(*parts[1:])
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{name}: no {target}"


def test_every_plugin_has_an_entry_point(root, sources):
    """A module of ours that implements a hook is found only through its line in pyproject.toml; starters are copied."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = {target.split(":")[0] for target in project["entry-points"]["oarlock"].values()}
    plugins = {source.module for source in sources if source.bank != "core" and "\n@hookimpl" in source.text}
    plugins = {module for module in plugins if not module.startswith("oarlock.plugins.starters.")}
    assert plugins <= listed, f"no entry point: {sorted(plugins - listed)}"
