"""One file for each way in which processors resize and divide images."""
