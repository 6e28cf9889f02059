"""Checks from outside whether a trainer clips and adds noise as it says. Start in `checks`."""
