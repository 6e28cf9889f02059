"""The suite: a package, so that none of the same name that is installed comes before it."""
