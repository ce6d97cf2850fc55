"""The `mixle lm` job: a byte-level language model trained on text files, beside two classical models and xz."""
