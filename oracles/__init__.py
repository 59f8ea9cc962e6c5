"""The judge: truth in float64, derived bounds, and the rules that an implementation must obey."""
