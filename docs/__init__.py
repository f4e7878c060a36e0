"""The documentation; `docs.generate` writes its reference pages from the code."""
