"""Registries: names are unique however they are spelled, errors name both owners, nothing is half registered."""

import attrs
import pytest

from oarlock.core import errors
from oarlock.core.registry import Registries, Registry, fold


@attrs.frozen(eq=False)
class Item:
    name: object


class Sampler:
    name = "greedy"
    is_argmax_invariant = True

    def handles(self, params): ...

    def open(self, params): ...


def filled(*names):
    registry = Registry("layout")
    for name in names:
        registry.add(Item(name), "dist 1.0 (plugin)")
    return registry


def test_items_come_back_by_name_in_order_of_registration():
    """`get`, `names`, iteration, membership, length."""
    registry = filled("b", "a", "c")
    assert registry.names() == ("b", "a", "c")
    assert [item.name for item in registry] == ["b", "a", "c"]
    assert registry.get("a").name == "a"
    assert registry.owner("a") == "dist 1.0 (plugin)"
    assert "a" in registry
    assert "A" not in registry
    assert None not in registry
    assert len(registry) == 3


def test_an_unknown_name_suggests_the_nearest():
    """Near in letters, or the same but for case and hyphens."""
    for wrong, right in (("quantised", "quantized"), ("TOP-K", "top_k")):
        with pytest.raises(errors.UnknownName) as caught:
            filled("quantized", "top_k").get(wrong)
        assert (caught.value.kind, caught.value.name) == ("layout", wrong)
        assert repr(right) in str(caught.value).partition(";")[0]
    with pytest.raises(errors.UnknownName, match="none"):
        Registry("layout").owner("x")


@pytest.mark.fault("Q-06")
@pytest.mark.parametrize("spelling", ["top_k", "top-k", "Top-K", "TOP_K"])
def test_one_name_twice_names_both_owners(spelling):
    """Case, and hyphen against underscore, make no new name."""
    registry = Registry("sampler")
    registry.add(Item("top_k"), "one 1.0 (a)")
    with pytest.raises(errors.DuplicateName) as caught:
        registry.add(Item(spelling), "two 2.0 (b)")
    assert (caught.value.first, caught.value.second) == ("one 1.0 (a)", "two 2.0 (b)")
    assert registry.names() == ("top_k",)
    assert registry.owner("top_k") == "one 1.0 (a)"


@pytest.mark.fault("Q-06")
def test_the_identical_object_twice_is_fine():
    """A double install is no error, and the first owner stays."""
    registry, item = Registry("sampler"), Item("x")
    registry.add(item, "one")
    registry.add(item, "two")
    assert (registry.names(), registry.owner("x")) == (("x",), "one")


@pytest.mark.parametrize("bad", [Item(""), Item("  "), Item(None), Item(3), object(), "name", Sampler])
def test_what_has_no_name_or_is_a_class_is_refused(bad):
    """The usual slip is to register the class and not an instance."""
    registry = Registry("sampler")
    with pytest.raises(errors.InvalidPlugin) as caught:
        registry.add(bad, "one 1.0 (a)")
    assert caught.value.owner == "one 1.0 (a)"
    assert len(registry) == 0


def test_an_item_that_lacks_part_of_its_contract_is_refused_naming_the_part():
    """At registration, not in the middle of a step."""
    registries = Registries()
    registries.samplers.add(Sampler(), "one")
    for member in ("handles", "open", "is_argmax_invariant"):
        broken = type("Broken", (), {k: v for k, v in vars(Sampler).items() if k != member and not k.startswith("__")})
        with pytest.raises(errors.InvalidPlugin) as caught:
            registries.samplers.add(broken(), "two")
        assert member in caught.value.allowed


def test_frozen_means_frozen():
    """A model is bound: later registration raises with the reason."""
    registries = Registries()
    registries.adapters.add(Item("fifo"), "one")
    registries.freeze()
    for registry in registries:
        registry.contract = None
        with pytest.raises(errors.RegistryFrozen) as caught:
            registry.add(Item("late"), "two")
        assert caught.value.kind == registry.kind
    assert registries.adapters.get("fifo").name == "fifo"


def test_every_kind_has_its_registry():
    """One attribute a ``register_`` hook; messages use the singular."""
    registries = Registries()
    kinds = [registry.kind for registry in registries]
    assert kinds == [
        "layout",
        "method",
        "proposer",
        "sampler",
        "processor",
        "constraint",
        "policy",
        "adapter",
        "loader",
        "state_cache",
        "command",
    ]
    assert all(registries.of(kind).kind == kind for kind in kinds)
    with pytest.raises(errors.UnknownName, match="sampler"):
        registries.of("samplers")


@pytest.mark.parametrize("second", [Item("taken"), Item("new"), Item(""), object()])
def test_a_plugin_is_registered_whole_or_not_at_all(second):
    """Validate all, then mutate: also when the plugin clashes with itself."""
    registries = Registries()
    registries.adapters.add(Item("taken"), "one")
    with pytest.raises(errors.PluginError):
        registries.add_all({"command": [Item("p")], "adapter": [Item("new"), second]}, "two")
    assert registries.commands.names() == ()
    assert registries.adapters.names() == ("taken",)
    registries.add_all({"command": [Item("p")], "adapter": [Item("new")]}, "two")
    assert registries.adapters.names() == ("taken", "new")


def test_folding():
    """The form under which names are compared."""
    assert fold("Top-K") == fold("top_k") != fold("topk")
