"""The claims, one file each: what must hold, why, exactly or within which bound, and what it kills."""
