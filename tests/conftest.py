"""Fixtures shared by the tests."""

import contextlib
import copy
import io
import json
import re
import sys
from pathlib import Path

import jaxtyping
import pytest
from answers import check_answer
from cyclopts import App

from pipejax.cli.app import run
from pipejax.cli.output.report import Answer, current_style, printing


@pytest.fixture(autouse=True)
def _closed_figures():
    """Close what a test has drawn, whichever test is next: pyplot keeps figures until then."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session", autouse=True)
def own_store(tmp_path_factory):
    """Keep the user's store of solved problems out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEJAX_CACHE", str(tmp_path_factory.mktemp("store")))
        yield


def unparsed(arguments):
    """Copy options that no line has set yet, with those inside them."""
    copies = {id(argument): copy.copy(argument) for argument in arguments}
    for argument in copies.values():
        argument.tokens = []
        argument.children = type(arguments)(copies[id(child)] for child in argument.children)
    return type(arguments)(copies.values())


@pytest.fixture(scope="session", autouse=True)
def options_of_commands():
    """Collect the options of a command once: that is most of the time of a short command."""
    collect, collected = App.assemble_argument_collection, {}

    def assemble(app, **how):
        key = id(app), *how.items()
        if key not in collected:  # which holds the app too, so that its id stays its own
            collected[key] = app, collect(app, **how)
        return unparsed(collected[key][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "assemble_argument_collection", assemble)
        yield


@pytest.fixture
def data():
    """Folder of recorded tables and published figures."""
    return Path(__file__).parent / "data"


@pytest.fixture
def unchecked():
    """Let arguments of a wrong type through to the library's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def call(capsys):
    """Run a command; return exit code, stdout and stderr."""

    def call(*arguments):
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        if "--json" in arguments and captured.out and code != 2:
            check_answer([str(a) for a in arguments], json.loads(captured.out))
        return code, captured.out, captured.err

    return call


@pytest.fixture
def answer(call):
    """Run a command with --json; return the object."""

    def answer(*arguments):
        code, out, err = call(*arguments, "--json")
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return answer


@pytest.fixture
def answer_and_text(call, monkeypatch):
    """Run a command once, and print its answer in both forms; return the object and the text."""

    def answer_and_text(*arguments):
        objects, show = [], Answer.show

        def show_both(answer):
            style = current_style()._replace(json=True, details=False)._asdict()
            with contextlib.redirect_stdout(io.StringIO()) as printed, printing(**style):
                show(answer)
            objects.append(json.loads(printed.getvalue()))
            show(answer)

        with monkeypatch.context() as patch:
            patch.setattr(Answer, "show", show_both)
            code, text, err = call(*arguments)
        assert code == 0, err
        (result,) = objects
        check_answer([str(a) for a in arguments], result)
        return result, text

    return answer_and_text


@pytest.fixture
def mistake(call):
    """Run a command that must end with code 2 and an error alone; return it and its hint."""

    def mistake(*arguments):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert re.fullmatch("error: .+\n(hint: .+\n)?", err)
        assert "no such command" not in err  # else nothing of the mistake was looked at
        return err.replace("\nhint: did", "; did").replace("\nhint", "")

    return mistake
