"""Third-party wheels in a fresh environment: found, listed, chosen by config, broken, at odds, removed."""

import json

import pytest

BROKEN = {
    "imports": "a_library_that_is_not_installed",
    "syntax": "SyntaxError",
    "exits": "SystemExit: not today",
    "hook": "half way",
    "typo": "did you mean 'request_finished'",
    "api": "OARLOCK_API = 99",
}

TINY = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.models.llama import Model, ModelArgs
model = Model(ModelArgs(model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=64,
    num_attention_heads=2, rms_norm_eps=1e-5, vocab_size=64, num_key_value_heads=1))
mx.eval(model.parameters())
from oarlock.core import Request, errors
from oarlock.core.engine import Engine
"""


def third_party(infos):
    return {info["name"]: info for info in infos if info["distribution"] != "oarlock"}


@pytest.fixture(scope="module")
def built(house):
    """Every plugin after loading, and the policies in order."""
    return house.answer(
        """
        import json
        from oarlock.core import manager
        plugins = manager.build()
        print(json.dumps([[i.as_dict() for i in plugins.infos], plugins.registries.policies.names()]))
        """
    )


@pytest.fixture(scope="module")
def checked(house):
    """Every plugin after a check in child processes."""
    return house.answer(
        "import json; from oarlock.core import manager\nprint(json.dumps([i.as_dict() for i in manager.check_plugins()]))"
    )


def test_listing_imports_nothing(house):
    """Metadata only: no plugin, no package of one, no mlx."""
    listed, modules = house.answer(
        """
        import json, sys
        from oarlock.core import manager
        listed = [i.as_dict() for i in manager.list_plugins(["driftwood"])]
        print(json.dumps([listed, sorted(sys.modules)]))
        """
    )
    infos = third_party(listed)
    assert {"before", "driftwood", "attribute", "one", "two", "after", *BROKEN} <= set(infos)
    assert (infos["driftwood"]["version"], infos["driftwood"]["state"]) == ("1.4", "blocked")
    assert {info["state"] for name, info in infos.items() if name != "driftwood"} == {"installed"}
    prefixes = ("driftwood", "mmm_", "aaa_", "twin_", "mlx", "oarlock.layouts", "oarlock.methods", "core")
    assert not [name for name in modules if name.startswith(prefixes)]


@pytest.mark.fault("Q-01", "Q-07")
def test_every_broken_plugin_is_skipped_with_its_reason(built):
    """ImportError, SyntaxError, SystemExit, a raising hook, a misspelt hook, another API, a missing attribute."""
    infos = third_party(built[0])
    for name, reason in {**BROKEN, "attribute": "nothing"}.items():
        assert infos[name]["state"] == "broken", name
        assert reason in infos[name]["reason"]
    assert {infos[name]["distribution"] for name in BROKEN} == {"mmm-broken"}


@pytest.mark.fault("Q-01")
def test_the_good_ones_before_and_after_work(built):
    """And nothing of a broken one is registered."""
    infos, policies = third_party(built[0]), built[1]
    assert infos["before"]["state"] == infos["driftwood"]["state"] == infos["after"]["state"] == "active"
    assert [name for name in policies if name in {"before", "after", "half", "newer", "twin", "Twin"}] == [
        "before",
        "twin",
        "after",
    ]


@pytest.mark.fault("Q-06")
def test_two_distributions_at_odds(built, house):
    """The second is listed as broken and both are named; only naming the name is an error."""
    info = third_party(built[0])["two"]
    assert info["state"] == "broken"
    assert "twin-one 1.1 (one)" in info["reason"]
    assert "twin-two 2.2 (two)" in info["reason"]
    got = house.answer(
        """
        import json
        from oarlock.core import errors, manager
        try:
            manager.build().resolve("policy", "twin")
        except errors.BrokenPlugin as error:
            print(json.dumps([error.distribution, error.version, error.reason]))
        """
    )
    assert got == ["twin-two", "2.2", info["reason"]]


def test_checking_tells_what_building_tells(built, checked):
    """Each in a child process; the same states, reasons and names."""
    keys = ("state", "registered", "api", "distribution", "version")
    expected = {name: {key: info[key] for key in keys} for name, info in third_party(built[0]).items()}
    assert {name: {key: info[key] for key in keys} for name, info in third_party(checked).items()} == expected
    assert third_party(checked)["driftwood"]["registered"] == {"layout": ["driftwood"]}


def test_our_own_plugins_are_sound_here_too(checked):
    """Found through their entry points, like anyone's."""
    own = {info["name"]: info for info in checked if info["distribution"] == "oarlock"}
    assert {"full", "plain", "greedy", "categorical", "log"} <= set(own)
    assert {name: info["reason"] for name, info in own.items() if info["state"] == "broken"} == {}
    assert own["log"]["state"] == "off"


def test_the_config_chooses_a_third_party_layout(house):
    """Its layout holds the layers, its observer is told, the broken ones are none of this engine's business."""
    layouts, tokens, ended = house.answer(
        TINY
        + """
import json
requests = [Request(prompt_ids=[1, 2, 3], max_tokens=4), Request(prompt_ids=[5], max_tokens=6)]
with Engine(model) as engine:
    plain = [r.token_ids for r in engine.generate(requests)]
with Engine(model, config={"layouts": {"full": "driftwood"}}) as engine:
    chosen = [r.token_ids for r in engine.generate(requests)]
    layouts = sorted({layer.layout.name for layer in engine.bound.layers})
from driftwood.plugin import ended
print(json.dumps([layouts, plain == chosen, ended]))
"""
    )
    assert (layouts, tokens, ended) == (["driftwood"], True, {"length": 4})


@pytest.mark.fault("Q-01")
@pytest.mark.parametrize(
    ("config", "distribution"),
    [
        ('{"layouts": {"full": "imports"}}', "mmm-broken 2.5"),
        ('{"method": {"name": "hook"}}', "mmm-broken 2.5"),
        ('{"scheduler": {"policy": "half"}}', "mmm-broken 2.5"),
        ('{"scheduler": {"policy": "twin"}}', "twin-two 2.2"),
        ('{"plugins": {"enable": ["api"]}}', "mmm-broken 2.5"),
    ],
)
def test_naming_a_broken_plugin_is_an_error(house, config, distribution):
    """With its distribution and version, before anything runs."""
    got = house.answer(
        TINY
        + f"""
import json
try:
    Engine(model, config={config})
except errors.BrokenPlugin as error:
    print(json.dumps(f"{{error.distribution}} {{error.version}}"))
"""
    )
    assert got == distribution


def test_the_command_line_lists_what_is_broken(house):
    """Exit code 0, and the reason."""
    code = "import sys; sys.argv[0] = 'oarlock'; from oarlock.plugins.cli import main; main()"
    done = house.run(code, "plugins", "--check", "--json")
    infos = third_party(json.loads(done.stdout))
    for name, reason in BROKEN.items():
        assert infos[name]["state"] == "broken"
        assert reason in infos[name]["reason"]
    assert infos["driftwood"]["state"] == "active"


def test_a_plugin_that_is_removed_is_gone(house, house_of, tmp_path):
    """Pip removes what is broken, and nothing remembers it; in another environment, since other tests want it there."""
    wheel, house = house.folder.with_name("mmm_broken-2.5-py3-none-any.whl"), house_of(tmp_path / "venv")
    house.pip("install", "--no-index", "--no-deps", str(wheel))
    assert set(BROKEN) <= set(third_party(_listed(house)))
    house.pip("uninstall", "-y", "mmm-broken")
    assert not set(BROKEN) & set(third_party(_listed(house)))


def _listed(house):
    code = "import json; from oarlock.core import manager\nprint(json.dumps([i.as_dict() for i in manager.list_plugins()]))"
    return house.answer(code)
