"""Every kind of storage, each on a model that has layers for it."""

import pytest

STORAGES = {
    "full": ("tiny-full", {}),
    "rotating": ("tiny-ring", {}),
    "quantized": ("qwen3", {"full": {"name": "quantized", "bits": 4, "group_size": 32}}),
    "paged": ("tiny-full", {"full": {"name": "paged", "block_size": 16}}),
    "delayed": ("qwen3", {"full": {"name": "delayed", "start": 20, "group_size": 32}}),
    "recurrent": ("mamba2", {}),
    "hybrid": ("qwen3_next", {}),
    "composite": ("falcon_h1", {}),
    "chunked": ("llama4", {}),
}


@pytest.fixture(params=STORAGES)
def storage(request):
    """The name of each."""
    return request.param


@pytest.fixture
def storages():
    """A model's name and its layouts, by storage."""
    return STORAGES
