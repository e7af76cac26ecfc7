"""Oracles and stand-ins shared by the tests. Nothing here is product code, and no oracle calls the code it judges."""
