"""How fast, beside whom, and right at that shape: contestants in turns in one process, under the judge."""
