"""Compile a PyTorch model written for one device into a program that trains on many."""

from .parallelize import parallelize, plan

__all__ = ["parallelize", "plan"]
