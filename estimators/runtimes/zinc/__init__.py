"""Memory as zinc plans it: the whole context before the first token, in float32."""
