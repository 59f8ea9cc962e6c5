"""Does a model still solve gsm8k with this attention path? Accuracy, paired, with stated power."""
