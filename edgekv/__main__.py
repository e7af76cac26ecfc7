"""`python -m edgekv` is `edgekv`."""

from edgekv.cli import main

main()
