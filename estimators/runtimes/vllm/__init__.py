"""Memory as vLLM divides it: weights and a profiled run first, a pool of KV blocks in the rest."""
