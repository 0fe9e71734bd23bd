"""`oarlock generate`: answers as they come, what they are compared with being the request alone in the engine."""

import contextlib
import json
import types

import click
import pytest

from oarlock.core.errors import InvalidConfigValue, UnknownConfigKey
from oarlock.core.request import Request
from oarlock.core.result import FinishReason, Result, Usage
from oarlock.plugins.cli import views
from oarlock.plugins.cli.console import harmless, to_json
from oarlock.plugins.cli.options import engine_config

SHORT = ("--max-tokens", "12")


def chat(text, system=None):
    """The messages that the command makes of a prompt."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def records(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_prompt_prints_the_answer_of_the_engine(tiny, invoke, solo):
    """As a chat turn, since the tokenizer has a template."""
    assert invoke("generate", tiny, "fox", *SHORT).stdout == solo(messages=chat("fox"), max_tokens=12).text + "\n"


def test_pieces_are_never_taken_back(tiny, invoke, solo, monkeypatch):
    """What stands on the screen is always the beginning of the final text: no half character, no part of a stop."""
    text = solo(prompt="fox", max_tokens=48, ignore_eos=False).text
    stop = text[len(text) // 2 :][:4]
    final = text[: text.index(stop)]
    pieces = []
    monkeypatch.setattr(views.click, "echo", lambda piece="\n", nl=True, **_: pieces.append(piece))
    invoke("generate", tiny, "fox", "--raw", "--max-tokens", 48, "--stop", stop)
    assert len(pieces) > 2
    for count in range(len(pieces)):
        assert final.startswith("".join(pieces[:count]))
    assert "".join(pieces) == final + "\n"


def test_an_answer_of_a_given_form(tiny, invoke):
    """And what is no JSON, or names no kind of constraint, is said before an answer is begun."""
    given = ("generate", tiny, "fox", "--raw", "--constraint")
    assert invoke(*given, '{"choice": ["an oar", "a lock"]}').stdout in {"an oar\n", "a lock\n"}
    assert "it is not JSON" in invoke(*given, "{choice", code=2).stderr
    assert "one key" in invoke(*given, "[]", code=1).stderr
    assert "did you mean 'choice'" in invoke(*given, '{"chioce": []}', code=1).stderr


def test_raw_takes_prompts_as_they_are(tiny, invoke, solo):
    raw = invoke("generate", tiny, "fox", "--raw", *SHORT).stdout
    assert raw == solo(prompt="fox", max_tokens=12).text + "\n"
    assert raw != invoke("generate", tiny, "fox", "--chat", *SHORT).stdout


def test_without_a_template_prompts_are_raw_and_it_says_so(untalkative, invoke):
    done = invoke("generate", untalkative, "fox", *SHORT)
    assert done.stdout == invoke("generate", untalkative, "fox", "--raw", *SHORT).stdout
    assert "no chat template" in done.stderr


@pytest.mark.parametrize("wanted", [["--chat"], ["--system", "be brief"]])
def test_a_chat_that_was_asked_for_needs_a_template(untalkative, invoke, wanted):
    """It is refused, never quietly made raw."""
    assert "no chat template" in invoke("generate", untalkative, "fox", *wanted, code=1).stderr


def test_a_system_message_opens_every_chat(tiny, invoke, solo):
    done = invoke("generate", tiny, "fox", "dog", "--system", "be brief", "--json", *SHORT)
    for record in records(done):
        assert record["text"] == solo(messages=chat(record["prompt"], "be brief"), max_tokens=12).text


def test_several_prompts_run_together_and_are_told_apart(tiny, invoke, solo):
    """Each block has its number, its prompt and the text that the prompt gets alone."""
    shown = invoke("generate", tiny, "fox", "dog", "river", *SHORT).stdout
    for number, prompt in enumerate(["fox", "dog", "river"], 1):
        assert f"[{number}] {prompt}\n{solo(messages=chat(prompt), max_tokens=12).text}\n" in shown


def test_more_prompts_than_the_queue_takes(tiny, invoke, solo):
    settings = ("--max-batch", 2, "--set", "scheduler.max_queued=1")
    got = records(invoke("generate", tiny, *"abcdefgh", "--json", *settings, *SHORT))
    assert {r["prompt"]: r["text"] for r in got} == {p: solo(messages=chat(p), max_tokens=12).text for p in "abcdefgh"}


def test_on_a_terminal_answers_grow_side_by_side(tiny, invoke, solo):
    shown = invoke("generate", tiny, "fox", "dog", *SHORT, env={"TTY_COMPATIBLE": "1", "COLUMNS": "200"}).stdout
    assert "[1] fox" in shown
    assert "[2] dog" in shown
    assert "\x1b[" in shown


def test_a_failed_prompt_takes_nobody_with_it(tiny, invoke, solo):
    """The others are answered, the error is one line on stderr with the prompt's number, the exit code is 1."""
    done = invoke("generate", tiny, "fox", "long " * 5000, *SHORT, code=1)
    assert solo(messages=chat("fox"), max_tokens=12).text in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert "prompt 2: PromptTooLong" in line


def test_json_holds_what_a_program_needs(tiny, invoke, solo):
    fields = ("--logprobs", 2, "--temperature", 0.8, "--seed", 5)
    *answers, stats = records(invoke("generate", tiny, "fox", "dog", "--json", "--stats", *fields, *SHORT))
    assert stats["stats"]["prompts"] == 2
    assert stats["stats"]["generated_tokens"] == sum(a["usage"]["generated_tokens"] for a in answers)
    for answer in answers:
        alone = solo(messages=chat(answer["prompt"]), max_tokens=12, temperature=0.8, seed=5, logprobs=2)
        assert answer["text"] == alone.text
        assert answer["token_ids"] == list(alone.token_ids)
        assert answer["finish_reason"] == alone.finish_reason
        assert [item["token"] for item in answer["logprobs"]] == answer["token_ids"]
        assert all(len(item["top"]) == 2 for item in answer["logprobs"])


def test_a_drawn_seed_is_reported_and_repeats_the_run(tiny, invoke):
    (first,) = records(invoke("generate", tiny, "fox", "--json", "--temperature", 1.5, *SHORT))
    seed = ("--seed", first["usage"]["seed"])
    (second,) = records(invoke("generate", tiny, "fox", "--json", "--temperature", 1.5, *seed, *SHORT))
    assert first["text"] == second["text"]


def test_logprobs_stand_below_the_answer(tiny, invoke, solo):
    shown = invoke("generate", tiny, "fox", "--logprobs", 0, *SHORT).stdout
    for item in solo(messages=chat("fox"), max_tokens=12, logprobs=0).logprobs:
        assert f"token {item.token}  {item.logprob:.4f}" in shown


def test_a_dash_reads_standard_input(tiny, invoke, solo):
    shown = invoke("generate", tiny, "-", *SHORT, input="the quick\nbrown fox").stdout
    assert shown == solo(messages=chat("the quick\nbrown fox"), max_tokens=12).text + "\n"


def test_stats_go_to_stderr(tiny, invoke):
    done = invoke("generate", tiny, "fox", "--stats", *SHORT)
    assert "tokens per second" in done.stderr
    assert "tokens per second" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "Missing argument 'MODEL'"),
        (["m"], "at least one PROMPT"),
        (["m", "-", "-"], "one prompt only"),
        (["m", "x", "--raw", "--system", "s"], "--system needs a chat"),
        (["m", "x", "--set", "scheduler"], "SECTION.KEY=VALUE"),
        (["m", "x", "--dtype", "int3"], "int3"),
        (["m", "x", "--max-tokens", "many"], "not a valid integer"),
    ],
)
def test_wrong_usage_is_code_2(invoke, arguments, shown):
    assert shown in invoke("generate", *arguments, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--stop", ""], "stop is ''"),
        (["--set", "scheduler.max_bach=4"], "did you mean 'max_batch'?"),
        (["--max-batch", "0"], "scheduler.max_batch is 0"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        ([], "no loader accepts it"),
    ],
)
def test_a_bad_value_is_one_line_and_code_1(invoke, arguments, shown):
    """Before any model is loaded, but for the last: there is none."""
    done = invoke("generate", "./no-such-model", "x", *arguments, code=1)
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1


def configured(*settings, **options):
    with click.Context(click.Command("x")):
        return engine_config(settings=settings, **options)


def test_settings_are_toml_or_bare_words():
    """They come after the file, section by section; other options come after them."""
    config = configured(
        "scheduler.max_batch=3",
        "scheduler.policy=fifo",
        "layouts.full={name='quantized', bits=8}",
        "layouts.layers.7.1=paged",
        "method.name=speculative",
        "method.depth=4",
        "plugins.enable=['log']",
        max_batch=5,
    )
    assert (config.scheduler.max_batch, config.scheduler.policy) == (5, "fifo")
    assert dict(config.layouts.kinds["full"].options) == {"bits": 8}
    assert config.layouts.layers["7.1"].name == "paged"
    assert dict(config.method.options) == {"depth": 4}
    assert config.plugins.enable == ("log",)


def test_settings_change_the_file_and_keep_the_rest(tmp_path):
    path = tmp_path / "oarlock.toml"
    path.write_text('[scheduler]\nmax_batch = 2\nprefill_chunk = 64\n[method]\nname = "x"\nk = 1\n')
    config = configured("scheduler.max_batch=7", "method.k=2", config=str(path))
    assert (config.scheduler.max_batch, config.scheduler.prefill_chunk) == (7, 64)
    assert (config.method.name, dict(config.method.options)) == ("x", {"k": 2})


def test_a_flag_outranks_the_plugins_that_the_file_enables(tmp_path, monkeypatch):
    monkeypatch.setenv("OARLOCK_PLUGINS", "log")
    config = configured("plugins.enable=['log', 'other']", "plugins.disable=['third']")
    assert config.plugins.enable == ("other",)
    assert config.plugins.disable == ("third", "log")


@pytest.mark.parametrize(
    ("setting", "error"), [("sheduler.max_batch=1", UnknownConfigKey), ("scheduler.pipeline=maybe", InvalidConfigValue)]
)
def test_settings_are_checked_like_the_file(setting, error):
    with pytest.raises(error):
        configured(setting)


def test_text_cannot_steer_the_terminal():
    """Control characters are shown as pictures; text, newlines and tabs stay."""
    assert harmless("a\x1b[2Jb\r\n\tc\x07\x7f\x9b") == "a␛[2Jb␍\n\tc␇␡\ufffd"
    assert harmless("naïve 你好 🙂 e\u0301") == "naïve 你好 🙂 e\u0301"


def test_json_is_strict():
    """No NaN, no Infinity, no lone surrogate."""
    line = to_json({"a": [float("-inf"), float("nan"), 1.5], "b": "\ud800é"})
    assert json.loads(line) == {"a": [None, None, 1.5], "b": "\ud800é"}
    line.encode()
    assert json.loads(to_json("naïve 🙂", "ascii").encode("ascii")) == "naïve 🙂"


def test_an_interrupted_answer_ends_its_line(capsys):
    """The shell's prompt does not follow on half a sentence."""
    prompt = types.SimpleNamespace(number=1, text="x", request=Request(prompt="x"))
    with views.StreamView() as view:
        view.piece(prompt, "half a")  # and no end
    assert capsys.readouterr().out == "half a\n"


def test_an_empty_answer_is_an_empty_line(capsys):
    prompt = types.SimpleNamespace(number=1, text="x", request=Request(prompt="x"))
    with views.StreamView() as view:
        view.finished(prompt, Result(id="1", token_ids=(), text="", finish_reason=FinishReason.STOP, usage=Usage()))
    assert capsys.readouterr().out == "\n"


@pytest.mark.fault("Q-08")
@pytest.mark.parametrize(
    ("option", "value", "read"),
    [
        ("--max-tokens", 7, lambda r, c: r.max_tokens),
        ("--temperature", 0.5, lambda r, c: r.sampling.temperature),
        ("--top-p", 0.25, lambda r, c: r.sampling.top_p),
        ("--top-k", 3, lambda r, c: r.sampling.top_k),
        ("--min-p", 0.125, lambda r, c: r.sampling.min_p),
        ("--seed", 9, lambda r, c: r.sampling.seed),
        ("--logprobs", 2, lambda r, c: r.sampling.logprobs),
        ("--stop", "end", lambda r, c: r.stop[0]),
        ("--max-batch", 3, lambda r, c: c.scheduler.max_batch),
        ("--dtype", "bfloat16", lambda r, c: c.model.dtype),
        ("--disable-plugin", "log", lambda r, c: c.plugins.disable[0]),
    ],
)
def test_no_option_is_without_effect(invoke, monkeypatch, option, value, read):
    """Each arrives in the request or in the configuration of the engine."""
    seen = []

    @contextlib.contextmanager
    def opened(model, config, group):
        def submit(request, events):
            seen.extend([request, config])
            raise QueueEnd

        yield types.SimpleNamespace(
            tokenizer=None, submit=submit, bound=types.SimpleNamespace(config=config, method="plain")
        )

    monkeypatch.setattr("oarlock.plugins.cli.generate.open_engine", opened)
    invoke("generate", "m", "x", option, value, code=1)
    assert read(*seen) == value


class QueueEnd(Exception):
    """Ends the run above."""
