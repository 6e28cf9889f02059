"""Checks that a trainer clips and adds noise, without trusting the trainer's code.

Start reading in `trainer_checks`.
"""
