"""Checks, without trusting a trainer's code, that it clips and adds noise. Start in `checks`."""
