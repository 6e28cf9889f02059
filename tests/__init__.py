"""The suite. It is a package, so that an installed package ``tests`` does not hide it."""
