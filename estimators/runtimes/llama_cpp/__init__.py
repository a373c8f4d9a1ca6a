"""Memory as llama.cpp allocates it: everything before the first token."""
