"""Plugins are loaded one by one: a broken one is listed with its reason and stops nobody; naming it is an error.

Distributions are made by hand in a folder on ``sys.path``: metadata, one module a plugin.
"""

import json
import sys
import textwrap
import time
import types
from pathlib import Path

import pluggy
import pytest
from structlog.testing import capture_logs

from oarlock.core import errors, hookimpl, hookspecs, manager
from oarlock.core.config import EngineConfig

POLICY = """
from oarlock.core import hookimpl
class Item:
    def __init__(self, name):
        self.name, self.coalesce_s = name, 0.0
    def ends_after_preparation(self, counts): return False
    def admits_before_decode(self, counts): return False
    def choose(self, lanes): return 0
@hookimpl
def register_adapters(register):
    for name in NAMES:
        register(Item(name))
"""
BROKEN = {
    "import": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    "syntax": ("def f(:\n    pass", "SyntaxError"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "raises": ("1 / 0", "ZeroDivisionError"),
    "base": ("class Stop(BaseException): pass\nraise Stop('now')", "Stop: now"),
    "mute": ("class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute", "Mute: its message cannot"),
    "hook": (POLICY + "    raise RuntimeError('half way')\nNAMES = ['half']", "RuntimeError: half way"),
    "nothing": ("x = 1", "@hookimpl"),
    "api": (POLICY + "NAMES = ['api']\nOARLOCK_API = 2", "declares OARLOCK_API = 2"),
    "api_text": (POLICY + "NAMES = ['api']\nOARLOCK_API = '1'", "declares OARLOCK_API = '1'"),
    "api_bool": (POLICY + "NAMES = ['api']\nOARLOCK_API = True", "declares OARLOCK_API = True"),
    "typo": ("from oarlock.core import hookimpl\n@hookimpl\ndef request_finnished(): ...", "'request_finished'"),
    "argument": ("from oarlock.core import hookimpl\n@hookimpl\ndef request_failed(request, eror): ...", "'eror'"),
    "keyword": ("from oarlock.core import hookimpl\n@hookimpl\ndef request_failed(*, error): ...", "'error'"),
    "default": ("from oarlock.core import hookimpl\n@hookimpl\ndef request_failed(error=None): ...", "has a default"),
    "async": ("from oarlock.core import hookimpl\n@hookimpl\nasync def request_failed(): ...", "coroutine"),
    "agen": ("from oarlock.core import hookimpl\n@hookimpl\nasync def request_failed(): yield", "coroutine"),
    "wrapper": ("from oarlock.core import hookimpl\n@hookimpl(wrapper=True)\ndef step_finished(): yield", "wrapper"),
    "nameless": (POLICY + "NAMES = ['']", "non-empty string"),
    "number": (POLICY + "NAMES = [3]", "non-empty string"),
    "itself": (POLICY + "NAMES = ['a-b', 'A_b']", "registered twice"),
    "contract": (POLICY.replace("adapters", "layouts") + "NAMES = ['flat']", "bytes_at"),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path; calling it adds a distribution to it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def add(distribution, version="1.0", *, where=tmp_path, extra="", **plugins):
        info = where / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = []
        for name, source in plugins.items():
            module = f"{distribution.replace('-', '_')}_{name}"
            where.joinpath(f"{module}.py").write_text(textwrap.dedent(source))
            lines.append(f"{name} = {module}{extra}")
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        info.joinpath("entry_points.txt").write_text("\n".join(["[oarlock]", *lines, ""]))
        return info

    yield add
    for name in set(sys.modules) - before:
        del sys.modules[name]


def build(plugins=(), disable=("oarlock",), **settings):
    with capture_logs() as lines:
        made = manager.build(EngineConfig.load({"plugins": settings}), plugins=plugins, disable=disable)
    return made, lines


def third_party(plugins):
    return {f"{i.distribution}:{i.name}": i for i in plugins.infos if i.distribution != "oarlock"}


def module(source, **names):
    made = types.ModuleType("passed")
    exec(source, vars(made))  # noqa: S102 - a plugin passed as an object
    vars(made).update(names)
    return made


# --- broken plugins ---------------------------------------------------------------------------------------


@pytest.mark.fault("Q-01", "Q-07")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_stops_nobody_and_is_listed_with_its_reason(site, kind):
    """FAULTS Q-01 and Q-07: one good plugin before it and one after it still work; it leaves no trace."""
    source, reason = BROKEN[kind]
    site("aaa-good", first=POLICY + "NAMES = ['one']")
    site("mmm-broken", "2.5", bad=source)
    site("zzz-good", last=POLICY + "NAMES = ['two']")
    plugins, lines = build()
    infos = third_party(plugins)
    assert [info.state for info in infos.values()] == ["active", "broken", "active"]
    broken = infos["mmm-broken:bad"]
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert (broken.distribution, broken.version) == ("mmm-broken", "2.5")
    assert plugins.registries.adapters.names() == ("one", "two")
    assert len(plugins.manager.get_plugins()) == 2
    assert [(line["event"], line["distribution"]) for line in lines] == [("plugin_broken", "mmm-broken")]
    with pytest.raises(errors.BrokenPlugin) as caught:
        plugins.resolve("adapter", "bad")
    assert (caught.value.distribution, caught.value.version) == ("mmm-broken", "2.5")
    assert reason in caught.value.reason


@pytest.mark.fault("Q-01", "Q-07", twin=True)
@pytest.mark.parametrize("kind", ["import", "syntax", "exit", "raises", "base", "typo", "api"])
def test_the_twin_of_it_bulk_loading_lets_one_stop_the_rest_or_says_nothing(site, kind):
    """What pluggy offers for this is why each plugin is loaded alone: the fault is there when it is planted."""
    site("aaa-good", first=POLICY + "NAMES = ['one']")
    site("mmm-broken", "2.5", bad=BROKEN[kind][0])
    site("zzz-good", last=POLICY + "NAMES = ['two']")
    bulk = pluggy.PluginManager("oarlock")
    bulk.add_hookspecs(hookspecs)
    for info in manager.list_plugins():
        if info.distribution == "oarlock":
            bulk.set_blocked(info.name)
    stopped = None
    try:
        bulk.load_setuptools_entrypoints("oarlock")
    except BaseException as error:  # noqa: BLE001 - SystemExit is one of the faults
        stopped = error
    loaded = sum(name in ("first", "last") for name, _ in bulk.list_name_plugin())
    assert (stopped is not None and loaded < 2) or bulk.has_plugin("bad")


def test_a_wrong_attribute_and_a_malformed_entry_point_are_broken(site):
    """``module:attribute`` that is not there, and text that is no entry point."""
    info = site("wrong", good=POLICY + "NAMES = ['one']")
    info.joinpath("entry_points.txt").write_text("[oarlock]\na = wrong_good:nothing\nb = !?\nc = wrong_good\n")
    infos = third_party(build()[0])
    assert [info.state for info in infos.values()] == ["broken", "broken", "active"]
    assert "nothing" in infos["wrong:a"].reason


@pytest.mark.fault("Q-03")
def test_a_missing_extra_says_which_command_installs_it(site):
    """FAULTS Q-03: the real ImportError and the extra."""
    site("some-kit", bad="import no_such_module_anywhere", extra=" [fast]")
    reason = third_party(build()[0])["some-kit:bad"].reason
    assert "no_such_module_anywhere" in reason
    assert "some-kit[fast]" in reason


def test_naming_what_a_broken_plugin_would_have_registered_is_its_error(site):
    """As far as it came: names that were registered before it failed."""
    site("half", bad=BROKEN["hook"][0])
    plugins, _ = build()
    for name in ("half", "HALF"):
        with pytest.raises(errors.BrokenPlugin, match="half way"):
            plugins.resolve("adapter", name)
    with pytest.raises(errors.UnknownName):
        plugins.resolve("layout", "half")


@pytest.mark.parametrize("text", [None, "", "no colon here\n\n\xff"])
def test_unreadable_metadata_of_others_stops_nobody(site, tmp_path, text):
    """Half-deleted installs are common."""
    site("good", fine=POLICY + "NAMES = ['one']")
    folder = tmp_path / "ruin-1.dist-info"
    folder.mkdir()
    if text is not None:
        folder.joinpath("METADATA").write_text(text, encoding="latin-1")
        folder.joinpath("entry_points.txt").write_text("[oarlock]\nwhat = \n[[\nx\n")
    plugins, _ = build()
    assert plugins.registries.adapters.names() == ("one",)


def test_ctrl_c_while_loading_is_the_users(site):
    """The one thing that is not contained."""
    site("slow", bad="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        build()


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.fault("Q-06")
@pytest.mark.parametrize("spelling", ["x-1", "X_1", "x_1"])
def test_two_distributions_with_one_name(site, spelling):
    """FAULTS Q-06: both are named, the others load, and only naming it is an error."""
    site("first", "1.1", a=POLICY + "NAMES = ['x-1', 'mine']")
    site("second", "2.2", b=POLICY + f"NAMES = ['theirs', {spelling!r}]")
    site("third", c=POLICY + "NAMES = ['other']")
    plugins, _ = build()
    broken = third_party(plugins)["second:b"]
    assert broken.state == "broken"
    assert "first 1.1 (a)" in broken.reason
    assert "second 2.2 (b)" in broken.reason
    assert plugins.registries.adapters.names() == ("x-1", "mine", "other")
    assert plugins.resolve("adapter", "mine").name == "mine"
    for name in ("x-1", "theirs"):
        with pytest.raises(errors.BrokenPlugin, match=r"second 2\.2"):
            plugins.resolve("adapter", name)


@pytest.mark.fault("Q-06")
def test_a_plugin_cannot_take_a_built_in_name(site):
    """The built-in one stays, whether named or not; the other is listed as broken."""
    source = POLICY.replace("adapters", "policies") + "NAMES = ['fifo', 'new']"
    own = "oarlock"
    site("third", bad=source)
    site("aaa", good=POLICY + "NAMES = ['one']")
    site(own, "9.9", mine=source)
    plugins, _ = build(disable=())
    assert [info.distribution for info in plugins.infos] == [own, "aaa", "third"]
    assert plugins.infos[-1].state == "broken"
    assert plugins.registries.policies.owner("fifo") == "oarlock 9.9 (mine)"
    assert plugins.resolve("policy", "fifo") is plugins.registries.policies.get("fifo")


@pytest.mark.fault("Q-06")
def test_one_distribution_seen_twice_counts_once(site, tmp_path, monkeypatch):
    """The first on the path is the one that imports; its metadata is the one that is read."""
    site("double", "1.0", a=POLICY + "NAMES = ['old']")
    site("Double", "2.0", where=tmp_path / "before", a=POLICY + "NAMES = ['new']")
    monkeypatch.syspath_prepend(tmp_path / "before")
    infos = third_party(build()[0])
    assert [(info.version, info.state) for info in infos.values()] == [("2.0", "active")]


@pytest.mark.fault("Q-06")
def test_a_version_that_another_hides_counts_for_nothing(site, tmp_path, monkeypatch):
    """The first on the path has no plugin, so nothing of the second is found, though it has one."""
    site("double", "1.0", a=POLICY + "NAMES = ['old']")
    site("Double", "2.0", where=tmp_path / "before").joinpath("entry_points.txt").unlink()
    monkeypatch.syspath_prepend(tmp_path / "before")
    plugins, lines = build()
    assert third_party(plugins) == {}
    assert lines == []


@pytest.mark.fault("Q-06")
def test_one_object_behind_two_entry_points_is_fine(site):
    """It is registered once, and both are active."""
    info = site("twice", a=POLICY + "NAMES = ['one']")
    info.joinpath("entry_points.txt").write_text("[oarlock]\na = twice_a\nb = twice_a\n")
    plugins, _ = build()
    assert [info.state for info in third_party(plugins).values()] == ["active", "active"]
    assert plugins.registries.adapters.names() == ("one",)


def test_the_order_does_not_depend_on_the_disk(site):
    """By distribution, then by plugin."""
    site("zz", b=POLICY + "NAMES = ['zz.b']", a=POLICY + "NAMES = ['zz.a']")
    site("Aa", c=POLICY + "NAMES = ['aa.c']")
    assert build()[0].registries.adapters.names() == ("aa.c", "zz.a", "zz.b")


def test_names_that_nobody_has():
    """With suggestions from what is registered."""
    plugins, _ = build([module(POLICY, NAMES=["quantized"])])
    with pytest.raises(errors.UnknownName, match="'quantized'"):
        plugins.resolve("adapter", "quantised")
    with pytest.raises(errors.UnknownName):
        plugins.resolve("no such kind", "x")


# --- blocked, off, required ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bad", "BAD", "mmm-broken", "mmm_broken"])
@pytest.mark.parametrize("through", ["config", "argument"])
def test_a_blocked_plugin_is_not_even_imported(site, name, through):
    """By the plugin's name or its distribution's, in the config or through a flag."""
    site("mmm-broken", bad="import blocked_plugin_was_imported")
    site("zzz-good", last=POLICY + "NAMES = ['two']")
    given = {"disable": ["oarlock", name]} if through == "argument" else {}
    with capture_logs() as lines:
        config = EngineConfig.load({"plugins": {"disable": [name] if through == "config" else []}})
        plugins = manager.build(config, **(given or {"disable": ["oarlock"]}))
    assert third_party(plugins)["mmm-broken:bad"].state == "blocked"
    assert plugins.registries.adapters.names() == ("two",)
    assert lines == []
    with pytest.raises(errors.DisabledPlugin, match=r"plugins\.disable"):
        plugins.resolve("adapter", "bad")


def test_blocking_what_is_not_there_is_said_and_does_no_harm(site):
    """One config may serve several machines."""
    with capture_logs() as lines:
        manager.build(EngineConfig.load({"plugins": {"disable": ["nowhere"]}}), disable=["oarlock"])
    assert [(line["event"], line["plugin"]) for line in lines] == [("plugin_unknown", "nowhere")]


def test_off_unless_named(site):
    """``OARLOCK_OFF_BY_DEFAULT``: its hooks run only where the config enables it; a flag still blocks it."""
    site("net", port=POLICY + "NAMES = ['port']\nOARLOCK_OFF_BY_DEFAULT = True")
    plugins, lines = build()
    assert (third_party(plugins)["net:port"].state, lines) == ("off", [])
    assert plugins.registries.adapters.names() == ()
    with pytest.raises(errors.DisabledPlugin, match=r"plugins\.enable"):
        plugins.resolve("adapter", "port")
    plugins, _ = build(enable=["PORT"])
    assert plugins.resolve("adapter", "port").name == "port"
    plugins, _ = build(enable=["port"], disable=["oarlock", "net"])
    assert third_party(plugins)["net:port"].state == "blocked"


def test_enabling_what_is_broken_or_not_there_is_an_error(site):
    """It was named."""
    site("net", "3.0", port="import no_such_module_anywhere\nOARLOCK_OFF_BY_DEFAULT = True")
    with pytest.raises(errors.BrokenPlugin, match=r"net 3\.0"):
        build(enable=["port"])
    with pytest.raises(errors.UnknownName, match="'port'"):
        build(enable=["prot"])


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("some-plugin", True),
        ("Some_Plugin>=1.2", True),
        ("some-plugin~=1.2", True),
        ("some-plugin[extra]>1", True),
        ("some-plugin>=2", False),
        ("some-plugin!=1.5", False),
        ("not-installed-anywhere", False),
        ("not-installed-anywhere; python_version < '3'", True),
    ],
)
def test_requirements(site, requirement, met):
    """PEP 508 against what is installed, before anything is loaded."""
    site("some-plugin", "1.5", a=POLICY + "NAMES = ['one']")
    if met:
        assert build(require=[requirement])[0].registries.adapters.names() == ("one",)
    else:
        with pytest.raises(errors.RequirementUnmet) as caught:
            build(require=[requirement])
        assert caught.value.requirement == requirement
        assert "1.5" in caught.value.found or "no such" in caught.value.found


def test_a_requirement_that_is_none():
    """It names the key."""
    with pytest.raises(errors.InvalidConfigValue, match=r"plugins\.require"):
        build(require=["a plugin, please"])


# --- plugins that are passed ---------------------------------------------------------------------------------


def test_passed_plugins_are_owned_by_the_argument():
    """A module or an object; off by default does not matter to who passes it."""

    class Plugin:
        OARLOCK_OFF_BY_DEFAULT = True

        @hookimpl
        def choose_method(self, config):
            return "mine"

    plugins, _ = build([module(POLICY, NAMES=["one"], OARLOCK_OFF_BY_DEFAULT=True), Plugin()])
    assert plugins.registries.adapters.owner("one") == "argument (passed)"
    assert [(i.name, i.state) for i in plugins.infos[-2:]] == [("passed", "active"), ("Plugin", "active")]
    assert plugins.manager.hook.choose_method(model=None, config=None) == "mine"


@pytest.mark.parametrize(
    "kind", [kind for kind in BROKEN if kind not in {"import", "syntax", "exit", "raises", "base", "mute"}]
)
def test_a_broken_plugin_that_is_passed_raises_at_once(kind):
    """Whoever passes it hears of it."""
    source, reason = BROKEN[kind]
    with pytest.raises((errors.PluginError, RuntimeError)) as caught:
        build([module(source)])
    assert reason.removeprefix("RuntimeError: ") in str(caught.value)


def test_two_instances_of_one_class_are_two_plugins():
    """Names of passed plugins are made unique."""

    class Plugin:
        def __init__(self, seen):
            self.seen = seen

        @hookimpl
        def step_finished(self):
            self.seen.append(1)

    seen = []
    plugins, _ = build([Plugin(seen), Plugin(seen)])
    plugins.manager.hook.step_finished(step=None)
    assert seen == [1, 1]


def test_an_optional_hook_of_a_newer_version_is_no_error():
    """pluggy's ``optionalhook`` says so on purpose."""
    made = module("from oarlock.core import hookimpl\n@hookimpl(optionalhook=True)\ndef of_tomorrow(): ...")
    assert build([made])[0].infos[-1].state == "active"


def test_an_installed_plugin_may_be_passed_as_well(site):
    """The identical object twice is fine; and so it is turned on where it is off."""
    site("kit", a=POLICY + "NAMES = ['one']", b=POLICY + "NAMES = ['two']\nOARLOCK_OFF_BY_DEFAULT = True")
    build()
    plugins, _ = build([sys.modules["kit_a"], sys.modules["kit_b"]])
    assert plugins.registries.adapters.names() == ("one", "two")


# --- the table in docs/plugins.md ---------------------------------------------------------------------------

NAMED = POLICY + "NAMES = ['port']"
SITUATIONS = {
    "sound": NAMED,
    "broken": BROKEN["import"][0],
    "misspelt": BROKEN["typo"][0],
    "for another API number": NAMED + "\nOARLOCK_API = 99",
    "duplicate": NAMED,
    "blocked": NAMED,
    "off unless enabled": NAMED + "\nOARLOCK_OFF_BY_DEFAULT = True",
}


def promised():
    """What the page says: situation -> its four cells."""
    page = Path(__file__).parents[2] / "docs" / "plugins.md"
    table = page.read_text().partition("| a plugin | `oarlock plugins` |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {next(name for name in SITUATIONS if row[0].startswith(name)): row[1:] for row in rows}


@pytest.mark.fault("Q-01", "Q-06", "Q-07")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_becomes_of_a_plugin_is_what_the_page_says(site, situation):
    """Listed, checked, started with and named, in an engine that has a good plugin as well."""
    if situation == "duplicate":
        site("aaa-first", port=NAMED)
    site("mmm-mine", "2.5", port=SITUATIONS[situation])
    site("zzz-good", last=POLICY + "NAMES = ['two']")
    disable = ["oarlock", *(["mmm-mine"] if situation == "blocked" else [])]
    states = [
        next(info.state for info in infos if info.distribution == "mmm-mine")
        for infos in (manager.list_plugins(disable), manager.check_plugins(disable))
    ]
    plugins, _ = build(disable=disable)
    states.append(third_party(plugins)["mmm-mine:port"].state)
    assert "two" in plugins.registries.adapters.names()
    try:
        states.append("used" if plugins.resolve("adapter", "port").name == "port" else "")
    except errors.OarlockError as error:
        states.append(type(error).__name__)
    assert states == promised()[situation]


def test_the_page_has_a_line_for_each():
    assert list(promised()) == list(SITUATIONS)


# --- listing and checking -------------------------------------------------------------------------------------


def test_listing_reads_metadata_and_imports_nothing(site):
    """Not even what would fail; the records are plain data."""
    site("mmm-broken", "2.5", bad="raise SystemExit", worse="import listed_plugin_was_imported")
    site("zzz-good", last=POLICY + "NAMES = ['two']")
    before = set(sys.modules)
    infos = [info for info in manager.list_plugins(["worse"]) if info.distribution != "oarlock"]
    assert set(sys.modules) == before
    assert [(i.name, i.version, i.state) for i in infos] == [
        ("bad", "2.5", "installed"),
        ("worse", "2.5", "blocked"),
        ("last", "1.0", "installed"),
    ]
    assert json.loads(json.dumps(infos[0].as_dict())) == infos[0].as_dict()


def test_checking_imports_each_in_a_child_process(site):
    """What it registers, its API number, why it is broken; this process stays clean and nothing hangs it."""
    good = POLICY + "OARLOCK_API = 1\n"
    site("aaa", "1.1", first=good + "NAMES = ['one', 'two']\nprint('noise')", dup=good + "NAMES = ['x']")
    site("bbb", off=good + "NAMES = ['n']\nOARLOCK_OFF_BY_DEFAULT = True", dies="import os; os._exit(7)")
    site("ccc", bad="import no_such_module_anywhere", hook=BROKEN["hook"][0], loud="raise SystemExit('x')")
    site("ddd", blocked="raise SystemExit", dup=good + "NAMES = ['X']")
    site(
        "eee",
        threads=good + "NAMES = ['t']\nimport threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()",
    )
    site(
        "fff",
        child=good
        + "NAMES = ['c']\nimport subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'])",
    )
    before = set(sys.modules)
    infos = {i.distribution + ":" + i.name: i for i in manager.check_plugins(["blocked", "oarlock"])}
    assert not {name for name in set(sys.modules) - before if name[:4] in {"aaa_", "bbb_", "ccc_", "ddd_", "eee_"}}
    states = {key: info.state for key, info in infos.items() if info.distribution != "oarlock"}
    assert states == {
        "aaa:first": "active",
        "aaa:dup": "active",
        "bbb:off": "off",
        "bbb:dies": "broken",
        "ccc:bad": "broken",
        "ccc:hook": "broken",
        "ccc:loud": "broken",
        "ddd:blocked": "blocked",
        "ddd:dup": "broken",
        "eee:threads": "active",
        "fff:child": "active",
    }
    assert infos["aaa:first"].registered == {"adapter": ("one", "two")}
    assert infos["aaa:first"].api == 1
    assert "code 7" in infos["bbb:dies"].reason
    assert "no_such_module_anywhere" in infos["ccc:bad"].reason
    assert infos["ccc:hook"].registered == {"adapter": ("half",)}
    assert "aaa 1.1 (dup)" in infos["ddd:dup"].reason
    json.dumps([info.as_dict() for info in infos.values()])


def test_a_plugin_that_hangs_does_not_hang_the_caller(site):
    """It is ended with everything that it started, and says so."""
    spawn = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    site("ddd", hangs=spawn + "time.sleep(600)")
    start = time.monotonic()
    (info,) = (info for info in manager.check_plugins(["oarlock"], timeout=1.5) if info.distribution == "ddd")
    assert time.monotonic() - start < 30
    assert info.state == "broken"
    assert "longer than 1.5 s" in info.reason


def test_the_environment_is_not_read(site, monkeypatch):
    """OARLOCK_PLUGINS is the command line's business."""
    site("good", last=POLICY + "NAMES = ['two']")
    monkeypatch.setenv("OARLOCK_PLUGINS", "-last")
    assert build()[0].registries.adapters.names() == ("two",)
