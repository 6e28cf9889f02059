"""The suite. It is a package, so that an installed package ``tests`` does not hide it."""

import torch._dynamo  # noqa: F401 (a session inside a test forgets it, and torch cannot load it twice)
