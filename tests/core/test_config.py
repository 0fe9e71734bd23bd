"""One frozen configuration: every key is checked, and what does not exist yet is refused."""

import re
from pathlib import Path

import attrs
import pytest

from oarlock.core import errors, values
from oarlock.core.choices import Choice, parse_options
from oarlock.core.config import KINDS, EngineConfig, LayoutsConfig, SchedulerConfig
from oarlock.core.contracts import layout

SECTIONS = {section.name for section in attrs.fields(EngineConfig)}


def scheduler(**keys):
    return EngineConfig.load({"scheduler": keys}).scheduler


def refused(section, **keys):
    with pytest.raises(errors.InvalidConfigValue) as caught:
        EngineConfig.load({section: keys})
    return caught.value


# --- where it comes from ----------------------------------------------------------------------------------


def test_nothing_given_is_the_documented_defaults():
    """The scalars of the design's example file."""
    config = EngineConfig.load()
    assert config == EngineConfig.load({}) == EngineConfig()
    assert attrs.asdict(config.scheduler) == {
        "max_batch": 16,
        "max_queued": 64,
        "policy": "decode_first",
        "stall_bound_ms": 0,
        "prefill_chunk": 512,
        "prefill_batch_tokens": 2048,
        "tail_split": True,
        "early_first_token": True,
        "pipeline": "auto",
        "vectorised_sampling": True,
        "compiled": "auto",
        "mixed": "auto",
        "mixed_token_budget": "auto",
        "kv_budget": None,
        "overcommit": 1.0,
        "max_recoveries": 8,
        "verify": True,
    }
    assert (config.model.dtype, config.method.name, config.state_cache.name) == ("auto", "plain", "memory")
    assert config.plugins.disable == config.plugins.enable == config.plugins.require == ()


def test_file_mapping_and_object_are_the_same(tmp_path):
    """`load` takes a path, a mapping shaped like the file, or what it returned before."""
    path = tmp_path / "oarlock.toml"
    path.write_text(
        """
        [model]
        dtype = "float16"
        [scheduler]
        max_batch = 4
        pipeline = false
        kv_budget = "none"
        [layouts]
        full = { name = "quantized", bits = 8 }
        rotating = "rotating"
        [layouts.layers]
        "0-2" = "full"
        "7.1" = { name = "paged", block = 32 }
        [method]
        name = "speculative"
        proposer = "ngram"
        [plugins]
        disable = ["noisy"]
        require = ["attrs>=20"]
        """
    )
    mapping = {
        "model": {"dtype": "float16"},
        "scheduler": {"max_batch": 4, "pipeline": False, "kv_budget": "none"},
        "layouts": {
            "full": {"name": "quantized", "bits": 8},
            "rotating": "rotating",
            "layers": {"0-2": "full", "7.1": {"name": "paged", "block": 32}},
        },
        "method": {"name": "speculative", "proposer": "ngram"},
        "plugins": {"disable": ["noisy"], "require": ["attrs>=20"]},
    }
    config = EngineConfig.load(str(path))
    assert config == EngineConfig.load(path) == EngineConfig.load(mapping) == EngineConfig.load(config)
    assert config.layouts.kinds["full"] == Choice(name="quantized", options={"bits": 8})
    assert config.layouts.layers["7.1"].options == {"block": 32}
    assert config.method.options == {"proposer": "ngram"}


@pytest.mark.parametrize("content", [None, b"[scheduler\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    """Missing, not TOML, not UTF-8, twice the same key."""
    path = tmp_path / "engine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.UnreadableConfig) as caught:
        EngineConfig.load(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [3, ["scheduler"], True])
def test_what_is_no_configuration_is_refused(value):
    """Neither a path nor a mapping."""
    with pytest.raises(errors.InvalidConfigValue):
        EngineConfig.load(value)


def test_it_is_frozen():
    """Nothing changes under a running engine, nor through a mapping that was passed in."""
    options = {"name": "quantized", "bits": 8}
    config = EngineConfig.load({"layouts": {"full": options}})
    options["bits"] = 4
    assert config.layouts.kinds["full"].options["bits"] == 8
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.scheduler.max_batch = 1
    with pytest.raises(TypeError):
        config.layouts.kinds["full"] = None


def test_the_environment_is_not_read(monkeypatch):
    """The library reads no environment variable; the command line may."""
    for name in ("OARLOCK_PLUGINS", "OARLOCK_MAX_BATCH", "OARLOCK_CONFIG", "MAX_BATCH"):
        monkeypatch.setenv(name, "3")
    assert EngineConfig.load() == EngineConfig()


def test_updated_keeps_the_options_of_the_same_method():
    """Another method's options are no use to it."""
    config = EngineConfig.load({"method": {"name": "speculative", "proposer": "ngram", "depth": 2}})
    changed = config.updated({"method": {"depth": 5}}).method
    assert (changed.name, changed.options) == ("speculative", {"proposer": "ngram", "depth": 5})
    assert config.updated({"method": {"name": "speculative"}}) == config
    assert config.updated({"method": {"name": "plain"}}).method.options == {}


def test_updated_changes_the_named_keys_only():
    """Flags of a command line stand over the file."""
    config = EngineConfig.load({"scheduler": {"max_batch": 4, "pipeline": False}, "layouts": {"full": "a"}})
    changed = config.updated({"scheduler": {"max_batch": 2}, "layouts": {"rotating": "b", "layers": {"1": "c"}}})
    assert (changed.scheduler.max_batch, changed.scheduler.pipeline) == (2, False)
    assert {kind: choice.name for kind, choice in changed.layouts.kinds.items()} == {"full": "a", "rotating": "b"}
    assert changed.updated({"layouts": {"full": "d"}}).layouts.layers["1"].name == "c"
    assert config.scheduler.max_batch == 4


# --- unknown keys -------------------------------------------------------------------------------------------


@pytest.mark.fault("Q-08")
@pytest.mark.parametrize(
    ("given", "section", "nearest"),
    [
        ({"schedular": {}}, "", "scheduler"),
        ({"scheduler": {"max_bacth": 2}}, "scheduler", "max_batch"),
        ({"scheduler": {"prefill-chunk": 2}}, "scheduler", "prefill_chunk"),
        ({"model": {"Dtype": "auto"}}, "model", "dtype"),
        ({"state_cache": {"prefix_byte": 1}}, "state_cache", "prefix_bytes"),
        ({"plugins": {"disabled": []}}, "plugins", "disable"),
        ({"layouts": {"ful": "full"}}, "layouts", "full"),
        ({"layouts": {"layer": {}}}, "layouts", "layers"),
    ],
)
def test_an_unknown_key_names_the_nearest(given, section, nearest):
    """One letter off must not be an option without effect."""
    with pytest.raises(errors.UnknownConfigKey) as caught:
        EngineConfig.load(given)
    assert caught.value.section == section
    assert nearest in caught.value.known
    assert f"did you mean {nearest!r}" in str(caught.value)


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_a_section_that_is_no_table_is_refused(section):
    """``scheduler = 3`` is not a section."""
    with pytest.raises(errors.ConfigError):
        EngineConfig.load({section: 3})


@pytest.mark.parametrize("key", [5, None, ("a",)])
def test_keys_that_are_no_strings_are_refused(key):
    """A mapping built in code can hold anything."""
    with pytest.raises(errors.ConfigError):
        EngineConfig.load({key: {}})
    with pytest.raises(errors.ConfigError):
        EngineConfig.load({"scheduler": {key: 1}})


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "rows"), [(1, 1), (1.9, 1), (4, 4), (7.999, 7)])
def test_max_batch_is_rounded_down(given, rows):
    """``max(1, floor(value))`` for numbers >= 1."""
    assert scheduler(max_batch=given).max_batch == rows


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *(("max_batch", bad) for bad in (0, 0.99, -1, True, "16", None, float("nan"), float("inf"), [4])),
        *((key, bad) for key in ("max_queued", "prefill_chunk", "prefill_batch_tokens") for bad in (0, 1.5, True, "8")),
        *(
            (key, bad)
            for key in ("tail_split", "early_first_token", "pipeline", "verify")
            for bad in (0, 1, "true", None)
        ),
        *(("vectorised_sampling", bad) for bad in (1, "auto")),
        *((key, bad) for key in ("compiled", "mixed") for bad in (0, 1, "Auto", "true", None)),
        *(("max_recoveries", bad) for bad in (-1, 1.0, True)),
        *(("stall_bound_ms", bad) for bad in (-1, "0", True, float("nan"))),
        *(("overcommit", bad) for bad in (0.5, "1", True, float("inf"))),
        *(("kv_budget", bad) for bad in ("0%", "101%", "much", -1, True, "4 bananas", 0.0, 1.5)),
        *(("policy", bad) for bad in ("", " ", 3, None)),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_value(key, bad):
    """Type and range, with what was got and what is allowed."""
    error = refused("scheduler", **{key: bad})
    assert error.key == f"scheduler.{key}"
    assert error.got is bad
    assert error.allowed


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("model", {"dtype": "fp16"}),
        ("model", {"dtype": ["auto"]}),
        ("plugins", {"disable": "log"}),
        ("plugins", {"enable": [3]}),
        ("plugins", {"require": [""]}),
        ("method", {"name": ""}),
        ("method", {"name": None}),
        ("layouts", {"full": ""}),
        ("layouts", {"full": 3}),
        ("layouts", {"full": {"bits": 8}}),
        ("layouts", {"full": {"name": 8}}),
        ("layouts", {"layers": "full"}),
        ("plugins", {"disable": ["log"], "enable": ["log"]}),
    ],
)
def test_wrong_values_of_other_sections(section, keys):
    """Each names its key."""
    assert refused(section, **keys).key.startswith(section)


def test_sections_check_themselves():
    """A record built in code obeys the rules of the file."""
    with pytest.raises(errors.InvalidConfigValue, match=r"scheduler\.max_batch"):
        SchedulerConfig(max_batch=0)
    with pytest.raises(errors.InvalidConfigValue, match=r"scheduler\.overcommit"):
        attrs.evolve(SchedulerConfig(), overcommit=0.5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("12B", 12),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("10G", 10**10),
    ],
)
def test_byte_sizes(text, size):
    """Decimal and binary units, any case."""
    assert values.parse_bytes("key", text) == size


@pytest.mark.parametrize("bad", ["", "GiB", "-1GiB", "4 GiBs", "4e9", "1,5GB", 1.5, -1, True, None, "4PiB"])
def test_what_is_no_size_is_refused(bad):
    """The message shows how a size is written."""
    with pytest.raises(errors.InvalidConfigValue, match="GiB"):
        values.parse_bytes("key", bad)


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("none", None),
        (None, None),
        ("50%", 0.5),
        ("12.5 %", 0.125),
        ("100%", 1.0),
        (0.25, 0.25),
        ("1GiB", 2**30),
        (7, 7),
    ],
)
def test_budgets(given, budget):
    """Nothing, bytes, or a share of the memory."""
    assert values.parse_budget("key", given) == budget


# --- layouts and methods -------------------------------------------------------------------------------------


def test_the_kinds_are_those_of_the_layout_contract():
    """The configuration stands before the contracts and keeps its own copy."""
    assert KINDS == layout.KINDS


def test_a_layer_goes_before_its_kind():
    """By layer, else by kind, else nothing is named."""
    layouts = EngineConfig.load({"layouts": {"full": "quantized", "layers": {"2-4": "paged", "7.1": "ring"}}}).layouts
    assert layouts.for_layer("3", "full").name == "paged"
    assert layouts.for_layer("5", "full").name == "quantized"
    assert layouts.for_layer("7.1", "rotating").name == "ring"
    assert layouts.for_layer("7", "composite") is None
    assert sorted(layouts.layers) == ["2", "3", "4", "7.1"]


def test_a_choice_knows_where_it_stands():
    """So that bind can say which line of the file to change."""
    layouts = EngineConfig.load({"layouts": {"full": "a", "layers": {"2-4": "b"}}}).layouts
    assert layouts.kinds["full"].key == "layouts.full"
    assert layouts.layers["3"].key == "layouts.layers.2-4"


@pytest.mark.parametrize("path", ["", "x", "-1", "3-1", "1-", "7.", "7.1-2", "0-99999", "1.2.3", " 1"])
def test_a_layer_path_that_is_none_is_refused(path):
    """A number, a range, or a part of a composite layer."""
    assert refused("layouts", layers={path: "full"}).got == path


def test_two_choices_for_one_layer_are_refused():
    """Overlapping ranges have no order."""
    assert "0-3" in refused("layouts", layers={"0-3": "full", "2": "paged"}).allowed


def test_layouts_can_be_built_in_code():
    """Names, tables and choices alike."""
    layouts = LayoutsConfig(kinds={"full": Choice(name="paged", options={"block": 8})}, layers={"1": "full"})
    assert layouts.for_layer("0", "full").options == {"block": 8}


@attrs.frozen
class Options:
    bits: int = attrs.field(default=8, validator=attrs.validators.in_((4, 8)))
    group_size: int = 64


def test_options_are_checked_by_the_plugin_that_declares_them():
    """An unknown key names the nearest; a value that the class refuses names the section."""
    assert parse_options(Options, {"bits": 4}, "layouts.full") == Options(bits=4)
    with pytest.raises(errors.UnknownConfigKey, match="group_size"):
        parse_options(Options, {"groupsize": 32}, "layouts.full")
    with pytest.raises(errors.InvalidConfigValue, match=r"layouts\.full"):
        parse_options(Options, {"bits": 5}, "layouts.full")


# --- what is read ---------------------------------------------------------------------------------------------


def read_somewhere(name):
    """Say whether any source but the configuration itself reads an attribute of that name."""
    root = Path(__file__).parents[2]
    files = [
        file for bank in ("core", "layouts", "methods", "samplers", "plugins") for file in (root / bank).rglob("*.py")
    ]
    return any(re.search(rf"\.{name}\b", file.read_text()) for file in files if file.name != "config.py")


@pytest.mark.fault("Q-08")
def test_no_field_is_dead():
    """FAULTS Q-08: a key is read by some part of the engine, or refused; the twin is a key that nobody reads."""
    keys = [f"{s}.{f.name}" for s in sorted(SECTIONS) for f in attrs.fields(type(getattr(EngineConfig(), s)))]
    assert [key for key in keys if not read_somewhere(key.split(".")[1])] == []
    assert not read_somewhere("key_that_nobody_reads")
