"""`oarlock batch`: every line answered once, whatever the lines are and whatever ends the process."""

import io
import json
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest

from oarlock.core.errors import QueueFull
from oarlock.core.request import Request
from oarlock.core.result import FinishReason, Result, Usage
from oarlock.plugins.cli.drive import drive

SHORT = ("--max-tokens", "10")


@pytest.fixture
def files(tmp_path):
    """A place for the two files; ``write`` takes objects, text or bytes, one a line."""

    def write(*lines):
        whole = [
            line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        source.write_bytes(b"\n".join(whole) + b"\n")
        return source

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    return types.SimpleNamespace(source=source, out=out, write=write)


def records(path):
    raw = path.read_bytes()
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().splitlines()]


def answers(path):
    """Return text and tokens by id; each id once."""
    found = [r for r in records(path) if "error" not in r]
    assert len({r["id"] for r in found}) == len(found)
    return {r["id"]: (r["text"], r["token_ids"]) for r in found}


def errors(path):
    return {r["line"]: r["error"] for r in records(path) if "error" in r}


PROMPTS = ["fox", "dog", "the quick brown", "river", "naïve café", "你好"]


@pytest.fixture
def questions(files):
    """Six good lines and what they ask."""
    lines = [{"id": f"q{n}", "prompt": text, "max_tokens": 6 + n} for n, text in enumerate(PROMPTS)]
    files.write(*lines)
    return lines


@pytest.fixture
def expected(questions, solo):
    alone = {line["id"]: solo(**{**line, "id": None}) for line in questions}
    return {name: (result.text, list(result.token_ids)) for name, result in alone.items()}


def test_every_line_gets_what_it_gets_alone(tiny, invoke, files, expected):
    """Whatever runs beside it; exit 0."""
    done = invoke("batch", files.source, "-o", files.out, "--model", tiny, "--max-batch", 3)
    assert answers(files.out) == expected
    assert "6 answered, 0 errors" in done.stderr
    assert done.stdout == ""


def test_a_record_holds_what_a_program_needs(tiny, invoke, files):
    files.write(
        {"id": 7, "prompt": "fox", "max_tokens": 4, "ignore_eos": True, "logprobs": 1}, {"prompt_ids": [5, 6, 7]}
    )
    invoke("batch", files.source, "-o", files.out, "--model", tiny, *SHORT)
    by_id = {record["id"]: record for record in records(files.out)}
    assert set(by_id) == {7, "line-2"}
    seven = by_id[7]
    assert seven["finish_reason"] == "length"
    assert seven["usage"]["generated_tokens"] == 4
    assert [item["token"] for item in seven["logprobs"]] == seven["token_ids"]
    assert "logprobs" not in by_id["line-2"]


def test_a_line_may_have_a_constraint(tiny, invoke, files):
    """Answers are what each allows; one that does not compile is that line's error."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    lines = [
        {"id": "json", "prompt": "fox", "constraint": {"json_schema": {**schema, "additionalProperties": False}}},
        {"id": "regex", "prompt": "dog", "constraint": {"regex": "[a-c]{4}"}, "temperature": 1.0, "seed": 3},
        {"id": "free", "prompt": "the quick brown"},
        {"id": "broken", "prompt": "dog", "constraint": {"regex": "a(b"}},
        {"id": "unknown", "prompt": "dog", "constraint": {"rgx": "a"}},
    ]
    files.write(*lines)
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--max-tokens", 60, code=1)
    found = answers(files.out)
    assert set(json.loads(found["json"][0])) == {"n"}
    assert re.fullmatch("[a-c]{4}", found["regex"][0])
    refused = errors(files.out)
    assert set(refused) == {4, 5}
    assert refused[4]["type"] == "InvalidConstraint"
    assert "unclosed" in refused[4]["message"]
    assert "did you mean 'regex'" in refused[5]["message"]


BAD = [
    ("not json", "JSONDecodeError"),
    (b'{"id": "bytes", "prompt": "\xff"}', "UnicodeDecodeError"),
    ("[1, 2]", "InvalidParameter"),
    ("[" * 100_000, "RecursionError"),
    ({"id": "key", "prompt": "x", "max_tokns": 3}, "UnknownRequestKey"),
    ({"id": "value", "prompt": "x", "temperature": -1}, "InvalidTemperature"),
    ({"id": "type", "prompt": 5}, "InvalidParameter"),
    ({"id": "chat", "messages": "hi"}, "InvalidParameter"),
    ({"id": "sampling", "prompt": "x", "sampling": "no"}, "InvalidParameter"),
    ({"id": "nothing"}, "InvalidParameter"),
    ({"id": "both", "prompt": "x", "prompt_ids": [1]}, "InvalidParameter"),
    ({"id": "range", "prompt_ids": [300]}, "TokenOutOfRange"),
    ({"id": "long", "prompt_ids": [5] * 5000}, "PromptTooLong"),
    ({"id": "empty", "prompt": ""}, "EmptyPrompt"),
    ({"id": "template", "messages": [{"speaker": "user"}]}, None),
    ({"id": ["list"], "prompt": "x"}, "InvalidParameter"),
    ({"id": "", "prompt": "x"}, "InvalidParameter"),
    ({"id": True, "prompt": "x"}, "InvalidParameter"),
    ({"id": "good", "prompt": "again"}, "InvalidParameter"),
    ({"id": "code", "prompt": "x", "on_token": "print"}, "UnknownRequestKey"),
]


def test_a_bad_line_is_a_record_with_its_line_number(tiny, invoke, files, solo):
    """The others go on, and the exit code is 1."""
    lines = [{"id": "good", "prompt": "fox"}, *(line for line, _ in BAD), {"id": "last", "prompt": "dog"}]
    files.write(*lines)
    done = invoke("batch", files.source, "-o", files.out, "--model", tiny, *SHORT, code=1)
    got = answers(files.out)
    assert got["good"][0] == solo(prompt="fox", max_tokens=10).text
    assert got["last"][0] == solo(prompt="dog", max_tokens=10).text
    found = errors(files.out)
    for number, (line, kind) in enumerate(BAD, 2):
        if kind is not None:
            assert found[number]["type"] == kind, line
    assert "Traceback" not in done.output


def test_blank_lines_and_a_byte_order_mark_are_nothing(tiny, invoke, files):
    files.write(b'\xef\xbb\xbf{"id": "a", "prompt": "fox"}', "", "  ", {"id": "b", "prompt": "dog"})
    invoke("batch", files.source, "-o", files.out, "--model", tiny, *SHORT)
    assert set(answers(files.out)) == {"a", "b"}


def test_options_serve_lines_that_do_not_name_a_field(tiny, invoke, files):
    """Also not in their table of sampling fields."""
    files.write(
        {"id": "default", "prompt": "fox", "ignore_eos": True},
        {"id": "own", "prompt": "fox", "ignore_eos": True, "max_tokens": 3},
        {"id": "table", "prompt": "fox", "ignore_eos": True, "sampling": {"seed": 9}},
    )
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--max-tokens", 5, "--seed", 4)
    got = {r["id"]: (r["usage"]["generated_tokens"], r["usage"]["seed"]) for r in records(files.out)}
    assert got == {"default": (5, 4), "own": (3, 4), "table": (5, 9)}


def test_answers_are_not_overwritten_unasked(tiny, invoke, files, expected):
    """Hours of answers are not lost by a forgotten flag."""
    files.out.write_text('{"id": "old", "text": ""}\n')
    refused = invoke("batch", files.source, "-o", files.out, "--model", tiny, code=1)
    assert "--resume" in refused.stderr
    assert files.out.read_text().startswith('{"id": "old"')
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--overwrite")
    assert answers(files.out) == expected


def test_overwrite_drops_nothing_before_the_model_is_there(invoke, files, questions):
    files.out.write_text('{"id": "old", "text": ""}\n')
    invoke("batch", files.source, "-o", files.out, "--model", "./no-such-model", "--overwrite", code=1)
    assert files.out.read_text().startswith('{"id": "old"')


def test_resume_skips_what_is_answered_and_redoes_the_rest(tiny, invoke, files, expected):
    """Errors and a torn last line are redone; whole answers stand as they are."""
    kept = {"id": "q1", "text": "answered before", "token_ids": [1]}
    torn = json.dumps({"id": "q2", "text": "torn"})
    error = {"id": "q3", "line": 4, "error": {"type": "RowError", "message": "then"}}
    files.out.write_text("\n".join([json.dumps(error), json.dumps(kept), torn[:-5]]))
    done = invoke("batch", files.source, "-o", files.out, "--model", tiny, "--resume")
    assert answers(files.out) == {**expected, "q1": ("answered before", [1])}
    assert errors(files.out) == {}
    assert "5 answered, 0 errors, 1 skipped" in done.stderr


def test_a_last_line_without_its_newline_is_redone(tiny, invoke, files, expected):
    """It may be whole by chance only."""
    files.out.write_text(json.dumps({"id": "q0", "text": "cut", "token_ids": []}))
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--resume")
    assert answers(files.out) == expected


def test_resume_of_nothing_is_a_first_run(tiny, invoke, files, expected):
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--resume")
    assert answers(files.out) == expected


def test_a_duplicate_stays_an_error_when_resumed(tiny, invoke, files):
    """It is no answered id."""
    files.write({"id": "a", "prompt": "fox"}, {"id": "a", "prompt": "dog"})
    for flags in ([], ["--resume"]):
        invoke("batch", files.source, "-o", files.out, "--model", tiny, *SHORT, *flags, code=1)
        assert set(answers(files.out)) == {"a"}
        assert set(errors(files.out)) == {2}


def test_a_file_of_something_else_is_not_resumed(invoke, files, questions):
    """Its lines are no answers, so nothing of it is cut off."""
    text = '{"name": "not ours"}\n{"torn'
    files.out.write_text("no newline")
    assert "line 1 of" in invoke("batch", files.source, "-o", files.out, "--resume", code=1).stderr
    files.out.write_text(text)
    assert "line 1 of" in invoke("batch", files.source, "-o", files.out, "--resume", code=1).stderr
    assert files.out.read_text() == text


def test_a_resumed_link_stays_a_link(tiny, invoke, files, expected, tmp_path):
    target = tmp_path / "elsewhere.jsonl"
    target.write_text('{"id": "q0", "error": {}}\n')
    files.out.symlink_to(target)
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--resume")
    assert files.out.is_symlink()
    assert answers(target) == expected


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["-o", "{source}"], 2, "one file"),
        ([], 2, "Missing option '-o'"),
        (["-o", "-", "--resume"], 2, "--resume"),
        (["-o", "-", "--json"], 2, "standard output"),
        (["-o", "{out}", "--resume", "--overwrite"], 2, "--resume"),
        (["-o", "{out}/there/is/none"], 1, "cannot write"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(invoke, files, questions, arguments, code, shown):
    filled = [a.format(source=files.source, out=files.out) for a in arguments]
    assert shown in invoke("batch", files.source, *filled, "--model", "./none", code=code).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_full_disk_is_one_line(tiny, invoke, questions, files):
    """It says what to do when there is room again."""
    done = invoke("batch", files.source, "-o", "/dev/full", "--model", tiny, code=1)
    assert "cannot write /dev/full: No space left on device; when that is mended, go on with --resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_answer_that_cannot_be_written_whole_is_redone(tiny, invoke, files, expected, monkeypatch):
    """A write may take a part only: the rest follows, or the line is torn and a resumed run redoes it."""

    class Narrow(io.FileIO):
        left = 700

        def write(self, data):
            if not Narrow.left:
                raise OSError(28, "No space left on device")
            count = min(len(data), Narrow.left, 50)
            Narrow.left -= count
            return super().write(bytes(data[:count]))

    real = Path.open

    def narrow(path, mode="r", **options):
        return Narrow(path, "a") if mode == "ab" else real(path, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", narrow)
        invoke("batch", files.source, "-o", files.out, "--model", tiny, code=1)
    assert not files.out.read_bytes().endswith(b"\n")
    assert 0 < files.out.read_bytes().count(b"\n") < 6
    invoke("batch", files.source, "-o", files.out, "--model", tiny, "--resume")
    assert answers(files.out) == expected


def test_a_missing_input_is_one_line(invoke, files):
    assert "cannot read" in invoke("batch", files.source, "-o", files.out, code=1).stderr


def test_standard_input_and_output(tiny, invoke, questions, files, expected):
    done = invoke("batch", "-", "-o", "-", "--model", tiny, input=files.source.read_bytes())
    assert {r["id"]: (r["text"], r["token_ids"]) for r in map(json.loads, done.stdout.splitlines())} == expected


def test_json_counts(tiny, invoke, files, questions):
    counts = json.loads(invoke("batch", files.source, "-o", files.out, "--model", tiny, "--json").stdout)
    assert (counts["answered"], counts["errors"], counts["skipped"]) == (6, 0, 0)


def endless(folder, number=8):
    """Lines that keep a tiny model busy for a while."""
    path = folder / "long.jsonl"
    lines = [{"id": n, "prompt": f"row {n}", "max_tokens": 40 + 60 * n, "ignore_eos": True} for n in range(number)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def wait_for_lines(path, process, count):
    deadline = time.monotonic() + 90
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_resumes_to_the_same_answers(tiny, start, invoke, tmp_path, files):
    """kill -9 in the middle: what was answered stands, the rest is answered as it would have been."""
    source, whole = endless(tmp_path), tmp_path / "whole.jsonl"
    common = ("--model", tiny, "--max-batch", 3)
    process = start("batch", source, "-o", files.out, *common)
    wait_for_lines(files.out, process, 2)
    process.kill()
    process.communicate()
    before = answers(files.out)
    assert 2 <= len(before) < 8
    with files.out.open("ab") as file:
        file.write(b'{"id": 7, "text": "to')  # what a kill in the middle of a line leaves
    invoke("batch", source, "-o", files.out, *common, "--resume")
    invoke("batch", source, "-o", whole, *common)
    assert answers(files.out) == answers(whole)
    assert before.items() <= answers(whole).items()


def test_ctrl_c_is_code_130_and_costs_no_answer(tiny, start, tmp_path, files):
    """No row that was running becomes an error record, and it says how to go on."""
    process = start(
        "batch", endless(tmp_path), "-o", files.out, "--model", tiny, "--max-batch", 1
    )  # one after the other
    wait_for_lines(files.out, process, 1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert 1 <= len(answers(files.out)) < 8
    assert errors(files.out) == {}
    assert said.decode().splitlines()[-2:] == [
        f"{len(answers(files.out))} answered before this stopped; --resume goes on from there",
        "interrupted",
    ]


def test_two_runs_do_not_write_one_file(tiny, start, invoke, tmp_path, files):
    """The second is refused and changes nothing."""
    process = start("batch", endless(tmp_path), "-o", files.out, "--model", tiny)
    try:
        wait_for_lines(files.out, process, 1)
        refused = invoke("batch", endless(tmp_path), "-o", files.out, "--model", tiny, "--resume", code=1)
        assert "another run is writing" in refused.stderr
    finally:
        process.kill()
        process.communicate()


# --- memory and failures, against an engine that does nothing ---------------------------------------------


class Idle:
    """An engine whose rows end one a step, with a queue that is full at times."""

    closed = False

    def __init__(self, max_batch=2, max_queued=3, steps=()):
        scheduler = types.SimpleNamespace(max_batch=max_batch, max_queued=max_queued)
        self.bound = types.SimpleNamespace(config=types.SimpleNamespace(scheduler=scheduler))
        self.rows, self.limit, self.errors = [], max_queued, dict(steps)

    def submit(self, request, events=None):
        if request.prompt == "refused":
            msg = "no"
            raise ValueError(msg)
        if sum(not row.done for row in self.rows) >= self.limit:
            raise QueueFull(self.limit, self.limit)
        self.rows.append(types.SimpleNamespace(done=False, outcome=None, name=request.prompt))
        return self.rows[-1]

    def step(self):
        error = self.errors.pop(len(self.rows), None)
        for row in self.rows if error else self.rows[:1]:
            row.done = True
            row.outcome = error or Result(
                id=row.name, token_ids=(), text="", finish_reason=FinishReason.STOP, usage=Usage()
            )
        self.rows = [row for row in self.rows if not row.done]
        if error:
            raise error
        return bool(self.rows)


def jobs(taken, names):
    for name in names:
        taken.append(name)
        yield types.SimpleNamespace(request=Request(prompt=name))


def test_few_requests_are_in_memory():
    """However long the input is, at most max_batch + max_queued lines have been read and not answered."""
    taken, over = [], []

    def finished(job, outcome):
        over.append(job.request.prompt)
        assert len(taken) - len(over) <= 2 + 3

    drive(Idle(), jobs(taken, map(str, range(1000))), finished)
    assert sorted(over, key=int) == [str(n) for n in range(1000)]


def test_a_refused_request_is_an_outcome():
    seen = {}
    drive(Idle(), jobs([], ["a", "refused", "b"]), lambda job, outcome: seen.update({job.request.prompt: outcome}))
    assert isinstance(seen["refused"], ValueError)
    assert isinstance(seen["a"], Result)
    assert isinstance(seen["b"], Result)


def test_a_failing_step_rejects_its_rows_and_the_rest_go_on():
    """The engine stays usable after an error of its driver."""
    seen = {}
    engine = Idle(steps=[(3, RuntimeError("driver"))])
    drive(engine, jobs([], "abcdef"), lambda job, outcome: seen.update({job.request.prompt: outcome}))
    kinds = [type(seen[name]).__name__ for name in "abcdef"]
    assert kinds == ["RuntimeError"] * 3 + ["Result"] * 3


def test_nothing_is_asked_of_an_engine_that_an_error_has_closed():
    """Every line that is left would get an error of its own."""
    engine = Idle(steps=[(3, RuntimeError("lost"))])
    engine.closed = True
    with pytest.raises(RuntimeError, match="lost"):
        drive(engine, jobs([], "abcdef"), lambda job, outcome: None)


def test_an_error_that_nobody_gets_is_raised():
    """Else it would come again and again."""
    engine = Idle()
    engine.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        drive(engine, jobs([], "ab"), lambda job, outcome: None)
