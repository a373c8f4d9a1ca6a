"""Facts about machines and runtimes, each with its source.

They are Python so that a short process reads them as quickly as its own code.
"""
