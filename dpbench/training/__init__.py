"""Trainers, and the phases of their steps."""
