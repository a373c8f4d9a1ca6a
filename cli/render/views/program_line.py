"""The command line of another program in front of its answer."""

from msgspec import UnsetType

from memfit.cli.render.document import Commands, Document, Text
from memfit.estimators.results.program_line import ProgramLine


def program_line(program: ProgramLine | UnsetType) -> Document:
    """Return the line as it was given, what of it changes no memory, and what it leaves open."""
    if not program:
        return ()
    ignored = [f"Changes no memory: {' '.join(program.ignored)}"] if program.ignored else []
    return (
        Commands((program.line,), "Answers for", only="page"),
        Text((*ignored, *program.notes), mark="-"),
    )
