"""What the command line does while it waits."""

from memfit.cli.progress import reporting


def test_later_work_is_prepared_once_and_only_while_waiting() -> None:
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
