"""Objectives: advantages, and one file for each loss."""
