"""The JSON Schemas of all documents for programs, in the package as ``memfit.schema``."""
