"""`python -m epcomm.cli`."""

from epcomm.cli.main import main

main()
