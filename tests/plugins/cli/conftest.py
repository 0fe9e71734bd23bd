"""A tiny model on disk, distributions that are not installed, and two ways to run a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café 你好 🙂 рыба", "oars and locks, rows and rivers"]


def save_tokenizer(folder, template):
    """Train a byte-level BPE of 300 tokens and write it as transformers keeps it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if template:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_model(folder, *, template=True):
    """Write a random llama whose weights are large enough that the past matters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import llama

    mx.random.seed(11)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "eos_token_id": 0,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: 3 * mx.random.normal(a.shape) / a.shape[-1] ** 0.5, model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, template)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The directory of a tiny model with a chat template."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untalkative(tmp_path_factory):
    """The same without a chat template."""
    return save_model(tmp_path_factory.mktemp("untalkative"), template=False)


@pytest.fixture(scope="session")
def solo(tiny):
    """Answer one request alone, through the engine and without the command line."""
    from oarlock.core import Request
    from oarlock.core.engine import Engine

    answers = {}

    def answer(**fields):
        key = json.dumps(fields, sort_keys=True)
        if key not in answers:
            with Engine.load(tiny) as engine:
                (answers[key],) = engine.generate([Request.from_mapping(fields)])
        return answers[key]

    return answer


@pytest.fixture
def invoke():
    """Run a command in this process."""
    from oarlock.plugins.cli.app import cli

    def run(*arguments, code=0, **options):
        done = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="oarlock", **options)
        assert done.exit_code == code, done.output + repr(done.exception)
        return done

    return run


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from oarlock.plugins.cli import main
main()
"""
"""As in the foreground of a terminal: what a shell runs behind itself, these tests perhaps, ignores interrupts."""


@pytest.fixture
def start(tmp_path):
    """Start a command in a process of its own, away from this checkout."""

    def start(*arguments, path=None, program=PROGRAM, **variables):
        environment = {**os.environ, **variables}
        environment.pop("OARLOCK_PLUGINS", None) if "OARLOCK_PLUGINS" not in variables else None
        environment["PYTHONPATH"] = str(path or "")
        command = [sys.executable, "-c", program, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    return start


@pytest.fixture
def run(start):
    """Run a command in a process of its own and return code, stdout and stderr."""

    def run(*arguments, code=0, given="", **options):
        process = start(*arguments, **options)
        out, err = process.communicate(given.encode(), timeout=180)
        done = SimpleNamespace(code=process.returncode, out=out.decode(), err=err.decode())
        assert code is None or done.code == code, done.err
        return done

    return run


@pytest.fixture
def distribution(tmp_path):
    """Put a distribution on a path: its metadata, and one plugin a module. Nothing is installed."""
    return lambda name, version, modules: write_distribution(tmp_path / "path", name, version, modules)


def write_distribution(folder, name, version, modules):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entries = [f"{key} = {name.replace('-', '_')}_{key}" for key in modules]
    (info / "entry_points.txt").write_text("\n".join(["[oarlock]", *entries, ""]))
    for key, source in modules.items():
        (folder / f"{name.replace('-', '_')}_{key}.py").write_text(textwrap.dedent(source))
    return folder
