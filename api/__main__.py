"""``python -m memfit`` is ``memfit``."""

from memfit.cli.__main__ import main

if __name__ == "__main__":
    main()
