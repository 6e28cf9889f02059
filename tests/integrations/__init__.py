"""Tests of private training in loops of other packages."""
