"""Settings of every test run."""

import os

from hypothesis import settings

# No deadline: a busy machine is not a bug. CI draws the same examples each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
