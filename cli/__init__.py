"""The command line."""

import gc

# Before anything is imported: in a short process collections free nothing and cost a fifteenth.
gc.set_threshold(100_000)
