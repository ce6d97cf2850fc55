"""Not stable yet. Nothing outside this package imports it statically."""
