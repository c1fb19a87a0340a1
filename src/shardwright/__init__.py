"""Compile a PyTorch model written for one device into a program that trains on many."""
