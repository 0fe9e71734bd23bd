"""Files stay under 300 lines, functions under 60, the core under 5,500 statements: what does not fit is two things."""

import ast

MAX_FILE, MAX_FUNCTION, MAX_CORE = 300, 60, 5500


def long_functions(source):
    """Functions over the limit, decorators and docstring counted."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (length := node.end_lineno - first + 1) > MAX_FUNCTION:
                yield f"{source.at(node)}  <- {length} lines, at most {MAX_FUNCTION}"


def long_files(sources):
    for source in sources:
        if (length := len(source.text.splitlines())) > MAX_FILE:
            yield f"{source.path}: {length} lines, at most {MAX_FILE}"


DECLARATIONS = ("core/contracts/", "core/errors/")


def core_statements(sources):
    """What the core decides: statements, docstrings apart; the kit, the contracts and the errors decide nothing."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for source in sources
        if source.bank == "core" and not source.is_kit and not str(source.path).startswith(DECLARATIONS)
        for node in ast.walk(source.tree)
    )


def test_no_file_is_over_300_lines(sources):
    found = list(long_files(sources))
    assert not found, "\n".join(found)


def test_no_function_is_over_60_lines(sources):
    found = [line for source in sources for line in long_functions(source)]
    assert not found, "\n".join(found)


def test_the_core_stays_under_its_limit_of_statements(sources):
    """docs/decisions says why statements are counted."""
    assert core_statements(sources) < MAX_CORE


def test_what_is_too_long_is_found(plant):
    """The walks' twins."""
    body = "    x = 1\n" * 60
    assert list(long_functions(plant("core/a.py", f"def f():\n{body}")))
    assert not list(long_functions(plant("core/a.py", "def f():\n" + "    x = 1\n" * 59)))
    assert list(long_files([plant("core/a.py", "x = 1\n" * 301)]))
    many = [plant("core/a.py", '"""Doc."""\n\n' + "x = 1\n" * 10), plant("core/testing/a.py", "x = 1\n" * 9)]
    assert core_statements([*many, plant("core/errors/a.py", "x = 1\n" * 9)]) == 10
