"""The contracts, one file each: inputs in signature order, shapes, checks, and case → tensors."""
