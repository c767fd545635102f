"""Weights on their way from trainer to engines: what is sent, how it travels, and the proof that it arrived."""
