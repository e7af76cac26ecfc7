"""Backends, each in its own package behind the protocol of base.py; heavy imports happen when one is opened."""
