"""Checks that a trainer clips and adds noise, without trusting its code.

Start reading in `trainer_checks`.
"""
