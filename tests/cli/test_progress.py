"""What the command line does while work is waited for."""

from memfit.cli.progress import reporting


def test_what_comes_after_is_prepared_once_and_only_where_something_is_waited_for() -> None:
    prepared: list[str] = []
    with reporting(verbose=False, while_waiting=lambda: prepared.append("now")) as progress:
        assert prepared == []
        for work in ("the listing", "the headers"):
            progress.begin(work, 1)
            assert prepared == ["now"]
            progress.advance()
            progress.end()
    with reporting(verbose=False, while_waiting=lambda: prepared.append("again")):
        pass
    assert prepared == ["now"]
