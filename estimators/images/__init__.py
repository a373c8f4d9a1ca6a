"""From the sizes of images to tokens and arrays, by the rules of each model's own processor."""
