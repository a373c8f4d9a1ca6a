"""Sample models, each with its source: the demo, the examples in the docs, and test cases."""
