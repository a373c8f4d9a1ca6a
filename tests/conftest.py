"""Settings of every test run."""

import os
import tempfile

from hypothesis import settings

# Nobody's token, settings or downloads take part; huggingface-hub reads these when it is imported.
for name in [name for name in os.environ if name.startswith("HF_")]:
    del os.environ[name]
os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), f"memfit-tests-no-home-{os.getpid()}")

# No deadline: a busy machine is not a bug. CI draws the same examples each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
