"""docs/config.md is what `make config` would write, and says something about every key."""

from pathlib import Path

import attrs
import pytest

from oarlock.core.config import EngineConfig

PATH = Path(__file__).parent / "settings.py"


@pytest.fixture(scope="module")
def settings(imported):
    return imported(PATH)


def test_the_page_is_up_to_date(settings):
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run: make config"


def test_every_key_says_what_it_does(settings):
    for section in attrs.fields(EngineConfig):
        cls = section.default.factory
        assert set(settings.said(cls)) == {field.name for field in attrs.fields(cls)}


def test_every_kind_of_plugin_with_options_is_there(settings):
    """Kinds whose plugins the configuration gives options, and no kind besides."""
    from oarlock.core import manager

    registries = manager.build(disable=["oarlock"], plugins=settings.built_in()).registries
    kinds = {
        registry.kind
        for registry in registries
        if any(hasattr(registry.get(name), "options") for name in registry.names())
    }
    assert kinds | {"policy"} == set(settings.OPTIONS)


def test_what_is_refused_in_no_words_is_an_error(settings):
    """The twin: a setting that takes anything cannot be described by what it refuses."""
    with pytest.raises(AssertionError, match="takes anything"):
        settings.allowed(lambda value: value)
