"""The models that the parity tests compile."""
