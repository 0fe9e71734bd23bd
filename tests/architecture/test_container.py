"""What hadolint cannot know of .ci/Containerfile: whether it takes all that a wheel is made of, and who is let in."""

import json
import re
import tomllib

import pytest

BANKS = ("core", "layouts", "methods", "plugins", "samplers")
MADE_OF = {"pyproject.toml", "README.md", "LICENSE", *BANKS}


def flaws(text, extras):
    """Yield what is wrong in the instructions of a container file."""
    lines = re.sub(r"^#.*\n", "", text.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    steps = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]
    copied = {name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]}
    if copied != MADE_OF:
        yield f"copies {sorted(copied ^ MADE_OF)} too much or too little"
    asked = re.search(r"\[([\w,]+)\]\"", text)
    if unknown := set(asked[1].split(",")) - extras if asked else {"none"}:
        yield f"asks for the extras {unknown}"
    if not [rest for word, rest in steps if word == "USER" and re.fullmatch(r"[1-9]\d*", rest)]:
        yield "runs as root"
    said = dict(steps)
    if json.loads(said["ENTRYPOINT"]) != ["oarlock"] or "0.0.0.0" in text:
        yield "chooses an address or a command for whoever starts it"
    if "LD_PRELOAD=libopenblas.so.0" not in said["ENV"] or "libopenblas0-" not in text:
        yield "computes with the reference BLAS"


@pytest.fixture(scope="module")
def given(root):
    """The file, and the extras that there are."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return (root / ".ci" / "Containerfile").read_text(), {*project["optional-dependencies"]}


def test_it_holds_what_a_wheel_needs_and_lets_nobody_in(given):
    assert list(flaws(*given)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("COPY samplers samplers\n", "", "samplers"),
        ("COPY core core", "COPY core tests core/", "tests"),
        ("grammar,serve]", "grammar,server]", "server"),
        ("USER 10001", "USER 0", "root"),
        ('CMD ["--help"]', 'CMD ["serve", "--host", "0.0.0.0"]', "address"),
        ("ENV LD_PRELOAD=libopenblas.so.0", "ENV A=1", "BLAS"),
    ],
)
def test_what_is_wrong_is_found(given, old, new, said):
    text, extras = given
    assert old in text
    (found,) = flaws(text.replace(old, new), extras)
    assert said in found
