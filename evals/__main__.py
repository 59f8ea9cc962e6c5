"""``python -m evals``."""

from evals.cli import main

main()
