"""What a user sees of a command that refuses its arguments."""

import pytest

from lowtide.commands.main import main


def refused(*arguments, capsys):
    """What is printed to stderr: the exit code is 2, and nothing else is printed."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert caught.value.code == 2, printed.err
    assert "Traceback" not in printed.err
    assert "the output cannot be written" not in printed.err
    assert printed.out == ""
    return printed.err
